"""A module's programs where torch.compile traces it: chosen by the batch, and their results put together.

Everything here that takes tensors is read by dynamo: plain code on constants, lists and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.program import roles
from stepgraph.runtime.compiled import Compiled
from stepgraph.runtime.traceable import Traceable
from stepgraph.torch_internals import pytree

_CONSTANTS = (type(None), bool, int, float, str)


def flat_batch(batch: Any) -> tuple[tuple[str, ...], list[Any]]:
    """(paths, leaves) of a batch, as they are flattened elsewhere, one level deep.

    Args:
        batch: (arguments, keywords) of a module; or what a loss takes.
    """
    if isinstance(batch, dict):
        return tuple(batch), list(batch.values())
    if not isinstance(batch, tuple):
        return ("batch",), [batch]
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        args, kwargs = batch
        paths = [f"0.{i}" for i in range(len(args))] + [f"1.{name}" for name in kwargs]
        return tuple(paths), [*args, *kwargs.values()]
    return tuple(str(i) for i in range(len(batch))), list(batch)


def _is_flat(paths: Sequence[str], tree: str) -> bool:
    """Whether a batch of these paths, flattened to this structure, is one that :func:`flat_batch` takes."""
    args = tuple(path for path in paths if path.startswith("0."))
    kwargs = {path[2:]: path for path in paths if path.startswith("1.")}
    possible = [(args, kwargs), dict.fromkeys(paths), tuple(paths), "batch"]
    return tree in [str(pytree.tree_structure(batch)) for batch in possible]


def can_be_replayed(key: tuple, compiled: Compiled) -> bool:
    """Whether torch.compile can have programs in its graph.

    Args:
        key: what they were made for.
    """
    (_, paths, tree), _, (modes, *_) = key
    results = compiled.results
    return (
        compiled.split is not None
        and modes is not None
        and not results.numbers
        and not compiled.values.changes  # torch.compile would not see what the code writes
        and all(isinstance(value, _CONSTANTS) for value in results.constants.values())
        and _is_flat(paths, tree)
    )


class Replay:
    """The programs of one kind of training call.

    Args:
        key: what they were made for.
        begin: called before each run.
        as_module: results are a module's, not a loss.
    """

    def __init__(
        self, key: tuple, compiled: Compiled, begin: Callable[[], None], as_module: bool
    ) -> None:
        split = compiled.split
        assert split is not None
        (self.leaves, self.paths, _), self.trained, (self.modes, *_) = key
        self.compiled, self.as_module = compiled, as_module
        self.device = split.state.device
        self.traceable = Traceable(split, begin)
        results = compiled.results
        self.tree, self.constants = results.tree, results.constants
        self.places = [r.index for r in split.results if isinstance(r, roles.ModuleResult)]

    def is_for(
        self,
        modes: tuple[bool, ...],
        trained: tuple[bool, ...],
        paths: tuple[str, ...],
        leaves: Sequence[Any],
    ) -> bool:
        """Whether a call is of this kind.

        Args:
            modes: of the module and its parts: training?
            trained: which of its parameters require a gradient.
            paths, leaves: the batch.
        """
        if (modes, trained, paths) != (self.modes, self.trained, self.paths):
            return False
        for leaf, (shape, dtype, *rest) in zip(leaves, self.leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                if shape != "constant" or dtype != type(leaf).__name__ or rest[0] != leaf:
                    return False
            elif (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) != (shape, dtype, bool(rest)):
                return False
        return True

    def run(self, leaves: Sequence[Any]) -> Any:
        """What the module returns, or the loss."""
        moved = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in leaves]
        found = self.traceable(moved)
        if not self.as_module:
            return found[0]
        made = [self.constants.get(i) for i in range(self.tree.num_leaves)]
        for place, value in zip(self.places, found, strict=True):
            made[place] = value
        return pytree.tree_unflatten(made, self.tree)
