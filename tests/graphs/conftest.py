from tests.graphs.recorder import calling_recorder, recorder

__all__ = ["calling_recorder", "recorder"]
