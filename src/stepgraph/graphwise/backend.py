"""What dynamo is given to compile graphs with."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import fx


class Backend:
    """What dynamo is given, and keeps: it holds the runner weakly.

    It may outlive the runner, hollow; what it compiled then is never run again.

    Args:
        runner: has ``compile(graph, examples, backward)``.
        backward: the graphs are of whole backwards.
    """

    def __init__(self, runner: Any, backward: bool) -> None:
        self._runner, self._backward = weakref.ref(runner), backward
        self.region = -1

    def __call__(self, graph: fx.GraphModule, examples: Any) -> Callable:
        """The callable that a graph is compiled to."""
        runner = self._runner()
        assert runner is not None, "its model is gone"
        return runner.compile(graph, examples, self._backward)
