"""What a callable returns besides tensors: no program computes it, and its caller gets it back."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from stepgraph.errors import GraphBreakError
from stepgraph.torch_internals import pytree


@dataclass(frozen=True)
class Results:
    """The structure of what a callable returned, and what in it is no tensor, by its place among leaves.

    ``numbers``: those that a program computes, as 0-dim tensors.
    """

    tree: pytree.TreeSpec
    constants: Mapping[int, Any]
    numbers: Collection[int] = ()

    @property
    def has_numbers(self) -> bool:
        """Whether one of them may count rows."""
        return any(type(x) in (int, float) for x in self.constants.values())

    def rebuild(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """The same, of other tensors."""
        tensors = {i: t.item() if i in self.numbers else t for i, t in tensors.items()}
        leaves = [
            tensors[i] if i in tensors else copy.deepcopy(self.constants.get(i))
            for i in range(self.tree.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, self.tree)


def take_constants(captured: fx.GraphModule) -> dict[int, Any]:
    """Takes what is no tensor out of the results: no program computes it."""
    output = captured.graph.output_node()
    leaves = list(output.args[0])  # type: ignore[arg-type]
    taken = {i: x for i, x in enumerate(leaves) if x is not None and not isinstance(x, fx.Node)}
    if taken:
        output.args = (tuple(None if i in taken else x for i, x in enumerate(leaves)),)
        captured.recompile()
    return taken


def unknown_result(error: AssertionError, model: nn.Module) -> GraphBreakError | None:
    """What says that a result is an object that torch cannot take apart, where an error is about that."""
    if "unrecognized type" not in str(error):
        return None
    return GraphBreakError(
        "the callable returns an object that no program can build",
        where=type(model).__qualname__,
        why=str(error),
        do="return tensors, numbers and strings, in tuples, lists, dicts, and dataclasses that torch knows "
        "(torch.utils._pytree.register_dataclass)",
    )
