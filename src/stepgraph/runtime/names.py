"""Programs take parameters and buffers by the names that they had when the model was given."""

from collections.abc import Mapping

from torch import nn

from stepgraph.errors import UsageError, name_a_few
from stepgraph.runtime.buffers import PlacesOfBuffers


def check_names(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: PlacesOfBuffers
) -> None:
    """Refuses a model in which one of them is another, or elsewhere.

    Args:
        parameters: as the model was given.

    Raises:
        UsageError: one was replaced, added, removed or moved.
    """
    now = dict(model.named_parameters())
    known = {id(parameter): name for name, parameter in parameters.items()}
    if new := [name for name, parameter in now.items() if id(parameter) not in known]:
        what = f"replaced or added since the model was given: {name_a_few(new)}"
    elif moved := [f"{known[id(p)]} to {name}" for name, p in now.items() if known[id(p)] != name]:
        what = f"moved since the model was given: {name_a_few(moved)}"
    elif len(now) < len(parameters):
        gone = [name for name in parameters if name not in now]
        what = f"removed since the model was given: {name_a_few(gone)}"
    else:
        buffers.check(model)
        return
    raise UsageError(
        f"parameters were {what}",
        why="they are placed when the engine is made, and its programs go on with those",
        do="change the model before; to load values, use load_state_dict without assign=True",
    )
