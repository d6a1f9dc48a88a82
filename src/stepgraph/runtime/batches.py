"""Batches: pytrees of tensors; their micro-batches and global shape; which kinds there have been."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.capture.module import BatchSpec
from stepgraph.errors import BatchError, ShapeLimitError
from stepgraph.runtime.ranks import Ranks, agree_on_shapes, largest
from stepgraph.torch_internals import pytree


@dataclass(frozen=True)
class LocalBatch(BatchSpec):
    """One rank's part of a batch, flattened. ``key`` is what a compiled program is specialised to."""

    key: tuple

    def shapes(self) -> str:
        """``input_ids [4, 128] int64, ...`` for messages."""
        return ", ".join(
            f"{path} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
            + (", its gradient wanted" if leaf.requires_grad else "")
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        )


def in_turn(pieces: Sequence[Any]) -> Iterator[tuple[str, int, Any]]:
    """(program, number, micro-batch) in the order they run: ``accumulate`` for all but the last."""
    for number, piece in enumerate(pieces):
        yield "step" if number == len(pieces) - 1 else "accumulate", number, piece


def first_on_each(
    named: Iterable[tuple[str, Any]], but: tuple[str, ...]
) -> dict[torch.device, str]:
    """``NAME on DEVICE`` of the first tensor on each device, those of some kinds left out."""
    first: dict[torch.device, str] = {}
    for name, value in named:
        if not isinstance(value, torch.Tensor) or value.device in first:
            continue
        if value.device.type not in but:
            first[value.device] = f"{name} on {value.device}"
    return first


def _check_devices(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuses a batch that lies on several accelerators; what is on the host may stay."""
    first = first_on_each(pairs, but=(torch_internals.host_device().type, "meta"))
    if len(first) > 1:
        raise BatchError(
            f"the batch is spread over several devices: {', '.join(first.values())}",
            do="put it on the device of the model, or leave it on the host",
        )


def flatten_batch(batch: Any, device: torch.device) -> LocalBatch:
    """Flattens a batch and moves its tensors to the device.

    Raises:
        BatchError: no tensor in it, tensors on several accelerators or of several sizes in dimension 0, or
            constants that no program can be chosen by.
    """
    pairs, tree = flatten_with_paths(batch)
    _check_devices(pairs)
    paths = tuple(path for path, _ in pairs)
    leaves = tuple(
        leaf.to(device, non_blocking=True)
        if isinstance(leaf, torch.Tensor)
        else _constant(path, leaf)
        for path, leaf in pairs
    )
    sizes = {
        path: leaf.shape[0]
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    if not sizes:
        raise BatchError(
            f"a batch must hold tensors whose dimension 0 is the batch, got {type(batch).__name__}"
        )
    if len(set(sizes.values())) > 1:
        raise BatchError(
            "the tensors of a batch must agree in dimension 0, which is the batch: "
            + ", ".join(f"{path} has {size}" for path, size in sizes.items()),
            do="expand what is shared by all rows to one for each (`.expand(rows, ...)`), make a number a "
            "0-dim tensor, or keep it on the model, as a buffer",
        )
    key = tuple(
        (tuple(leaf.shape), leaf.dtype, *(("gradient",) if _learns(leaf) else ()))
        if isinstance(leaf, torch.Tensor)
        else ("constant", type(leaf).__name__, leaf)
        for leaf in leaves
    )
    return LocalBatch(leaves, paths, tree, (key, paths, str(tree)))


def _learns(leaf: torch.Tensor) -> bool:
    """Whether its gradient will be asked for."""
    return leaf.requires_grad and torch.is_grad_enabled()


def _constant(path: str, leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError as error:
        raise BatchError(
            f"{path} is a {type(leaf).__name__}, which is no tensor and cannot be compared with another",
            why="what is no tensor is a constant of the compiled program",
            do="pass a tensor (torch.as_tensor), a number, a string or None, or keep it on the model",
        ) from error
    return leaf


_OUT_OF_RANGE = re.compile(r"out of (bounds|range)")
_NUMBER = re.compile(r"(?:index|target) (-?\d+)", re.IGNORECASE)


def index_error(error: Exception, named: Iterable[tuple[str, Any]]) -> BatchError | None:
    """Which tensors of a batch may hold the index that torch found out of range; None: it is not about one.

    Args:
        named: the batch's leaves.
    """
    if not _OUT_OF_RANGE.search(str(error)):
        return None
    numbers = [
        (name, leaf)
        for name, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf.numel() and _counts(leaf)
    ]
    found = _NUMBER.search(str(error))
    holders = [p for p in numbers if found and bool((p[1] == int(found[1])).any())] or numbers
    spans = [f"{name} (from {int(x.min())} to {int(x.max())})" for name, x in holders]
    if not spans:
        return None
    return BatchError(
        f"an index is out of range, which is likely in the batch's {' or '.join(spans)}",
        why=str(error).strip().splitlines()[0],
        do="labels and ids lie between 0 and the number of classes or words less one; labels to be ignored "
        "have the loss's ignore_index (-100)",
    )


def _counts(leaf: torch.Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def split_micro_batches(batch: LocalBatch, count: int) -> list[list[Any]]:
    """The leaves of each micro-batch: equal slices of dimension 0.

    Raises:
        BatchError: the batch does not divide.
    """
    size = next(leaf.shape[0] for leaf in batch.tensors if leaf.dim())
    if size % count or size == 0:
        raise BatchError(
            f"this rank's part of the batch has {size} rows, which do not divide into {count} "
            "micro-batches",
            do="choose a batch size per rank that is a multiple of micro_batches",
        )
    slices = [
        leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * count
        for leaf in batch.leaves
    ]
    return [list(leaves) for leaves in zip(*slices, strict=True)]


def global_spec(
    batch: LocalBatch, micro_batches: int, data_parallel: int, gradients: bool = False
) -> BatchSpec:
    """The batch of the global shape of one micro-batch, as fake tensors.

    Args:
        gradients: those of the leaves that require one are wanted.
    """
    fake = fake_leaves(lambda rows: rows // micro_batches * data_parallel)

    def whole(leaf: Any) -> Any:
        made = fake(leaf)
        wanted = gradients and isinstance(leaf, torch.Tensor) and _learns(leaf)
        return made.requires_grad_() if wanted else made

    return BatchSpec(tuple(map(whole, batch.leaves)), batch.paths, batch.tree)


def fake_leaves(rows: Callable[[int], int]) -> Callable[[Any], Any]:
    """What makes a fake tensor of a leaf, with another number of rows; what is no tensor stays.

    On the host, wherever the leaf is: a step is captured there whatever it will run on.
    """
    mode, host = torch_internals.new_fake_mode(), torch_internals.host_device()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [rows(leaf.shape[0]), *leaf.shape[1:]] if leaf.dim() else []
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device=host)

    return fake


def flatten_with_paths(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(path, leaf) pairs of a pytree in order, and its structure; ``{"x": t}`` gives ``"x"``."""
    named = type(tree) is dict and all(type(key) is str for key in tree)
    if named and all(type(one) is torch.Tensor for one in tree.values()):
        order, spec = _of_tensors(tuple(tree))
        return [(path, tree[key]) for path, key in order], spec
    pairs, spec = pytree.tree_flatten_with_path(tree)
    return [(_text(path), leaf) for path, leaf in pairs], spec


@functools.lru_cache(maxsize=64)
def _of_tensors(keys: tuple[str, ...]) -> tuple[list[tuple[str, Any]], Any]:
    """The (path, key) pairs of a dictionary of tensors in order, and its structure."""
    pairs, spec = pytree.tree_flatten_with_path({key: i for i, key in enumerate(keys)})
    return [(_text(path), keys[i]) for path, i in pairs], spec


def _text(path: Any) -> str:
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))) for key in path]
    return ".".join(str(key) for key in keys) or "batch"


@dataclass
class KindsOfBatch:
    """What each entry point has met so far, in an order that is every rank's.

    Attributes:
        limit: how many kinds programs are kept for.
        known: entry point -> keys of batches, numbered as they came.
    """

    ranks: Ranks
    limit: int
    known: dict[str, dict[tuple, int]] = field(default_factory=dict)

    def number(self, entry: str, batch: LocalBatch) -> int:
        """1: a batch is of the one kind there is; 0: it is of a new kind, or of several.

        Of those ranks agree in :meth:`meet`, where what differs is an error that may be caught.
        """
        known = self.known.get(entry, {})
        return int(len(known) == 1 and batch.key in known)

    def meet(self, entry: str, batch: LocalBatch) -> None:
        """Makes sure that all ranks bring a batch of the same kind; all of them call it at every call.

        As long as an entry point knows one kind nothing is exchanged, with several two numbers a call.

        Raises:
            BatchError: ranks have batches of different shapes.
            ShapeLimitError: a kind beyond those that programs are kept for.
        """
        known = self.known.setdefault(entry, {})
        number = known.get(batch.key, len(known))
        same = len(known) < 2 or largest(self.ranks, number, -number) == [number, -number]
        if same and number < len(known):
            return
        agree_on_shapes(batch.key, batch.shapes(), self.ranks)
        if number == len(known) == self.limit:
            raise ShapeLimitError(
                f"{self.limit + 1} different batch shapes, or constants in batches; "
                f"programs are kept for {self.limit}",
                why="so far: " + "; ".join(map(_show_key, known)),
                do="pad batches to a few lengths (stepgraph.pad_batches), pass numbers that change "
                "as tensors, or raise max_shapes",
            )
        known[batch.key] = number


def _show_key(key: tuple) -> str:
    """The shapes and constants of a batch."""
    leaves, paths, _ = key
    return ", ".join(
        f"{path}={leaf[2]!r}" if leaf[0] == "constant" else f"{path} {list(leaf[0])}"
        for path, leaf in zip(paths, leaves, strict=True)
    )
