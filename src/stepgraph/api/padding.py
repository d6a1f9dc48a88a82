"""Pads batches of varying length to a few lengths, so that real text trains with a few compilations.

Every new batch shape compiles a step (:class:`stepgraph.Engine`). Rounded up to a multiple, or to one of a
few lengths, sequences of a thousand different lengths have a handful of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from stepgraph.errors import BatchError, UsageError
from stepgraph.runtime.batches import flatten_with_paths
from stepgraph.torch_internals import pytree

IGNORE_INDEX = -100  # what torch's and transformers' cross entropy leave out
_LABELS = ("label", "labels", "target", "targets")
_TOKENS = ("input_ids", "decoder_input_ids", "ids", "tokens")
_OTHER_IDS = ("token_type_ids", "position_ids")
# They say what the batch's length is where other tensors have another size in dimension 1.
_SEQUENCES = (*_TOKENS, *_LABELS, *_OTHER_IDS, "attention_mask", "inputs_embeds")


def pad_batches(
    loader: Iterable[Any],
    *,
    multiple: int | None = None,
    lengths: Sequence[int] | None = None,
    pad_token_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
    fills: Mapping[str, float] | None = None,
    agree: bool = True,
    group: dist.ProcessGroup | None = None,
) -> PaddedBatches:
    """Pads the sequences of every batch of a loader at their end.

    The sequence is dimension 1, and the length of a batch is that of its ``input_ids``, ``labels`` and the
    like, or else what its tensors of two and more dimensions agree on. Each tensor with that size in
    dimension 1 is padded, by the last part of its key:

    ================================================== =============================================
    ``labels``, ``label``, ``targets``, ``target``     ``ignore_index``: these tokens count in no mean
    ``input_ids`` and other token ids                  ``pad_token_id``
    ``..._padding_mask`` (true where padded)           1
    everything else, ``attention_mask`` among it       0
    ================================================== =============================================

    A causal model without an attention mask is right: real tokens never see what follows them, and what
    padding predicts is ignored. A model that looks both ways needs the mask in the batch.

    Where a process group exists the ranks agree, with one small collective a batch, on the longest batch
    among them, because a step has one shape on all ranks; so all of them must iterate together.

    Args:
        loader: of batches, pytrees of tensors; a mapping that is no dict (``BatchEncoding``) becomes one.
        multiple: pad to the next multiple of it; this or ``lengths``.
        lengths: pad to the shortest of these that suffices.
        pad_token_id: for token ids.
        ignore_index: for labels of an integer type.
        fills: values by key or path (``"1"`` in a tuple), before all of the above. An integer tensor
            without a name, as in a tuple, needs one: it could be tokens or labels.
        agree: False: ranks pad alone, which is right where a sampler gives them equal lengths.
        group: whose ranks agree; None: all.

    Returns:
        an iterable like ``loader``: lazy, as long (``len``), iterated again as often.

    Raises:
        UsageError: not one of ``multiple`` and ``lengths``, or not positive; from the call itself.
        BatchError: while iterating: no sequence in a batch, tensors that disagree, a sequence longer
            than all lengths, an unnamed integer tensor, a loader that ends before another rank's.
    """
    if (multiple is None) == (lengths is None):
        raise UsageError(
            "pad_batches needs one of multiple and lengths",
            do="pad_batches(loader, multiple=64), or pad_batches(loader, lengths=[128, 256, 512])",
        )
    given = [multiple] if multiple is not None else list(lengths or [])
    if not given or not all(isinstance(n, int) and n > 0 for n in given):
        what = f"multiple={multiple!r}" if multiple is not None else f"lengths={lengths!r}"
        raise UsageError(f"pad_batches cannot pad to {what}", do="give positive integers")
    return PaddedBatches(
        loader, multiple, sorted(given), pad_token_id, ignore_index, dict(fills or {}), agree, group
    )


@dataclass(eq=False, repr=False)
class PaddedBatches:
    """What :func:`pad_batches` returns; ``loader`` is the loader it was given."""

    loader: Iterable[Any]
    multiple: int | None
    lengths: list[int]
    pad_token_id: int
    ignore_index: int
    fills: dict[str, float]
    agree: bool
    group: dist.ProcessGroup | None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has none

    def __iter__(self) -> Iterator[Any]:
        number = 0
        for number, batch in enumerate(self.loader, start=1):
            if isinstance(batch, Mapping) and not isinstance(batch, dict):
                batch = dict(batch)
            pairs, tree = flatten_with_paths(batch)
            own, length, problem = 0, 0, None
            try:
                own = _length(pairs)
                length = self._padded_length(own)
            except BatchError as error:  # said once the other ranks are not waiting for this one
                problem = error
            device = next((x.device for _, x in pairs if isinstance(x, torch.Tensor)), None)
            longest = self._longest(length, number, device, failed=problem is not None)
            if problem is not None:
                raise problem
            leaves = [self._pad(path, leaf, own, longest) for path, leaf in pairs]
            yield pytree.tree_unflatten(leaves, tree)
        self._longest(None, number, None)

    def _padded_length(self, length: int) -> int:
        if self.multiple is not None:
            return -(-length // self.multiple) * self.multiple
        fitting = [wanted for wanted in self.lengths if wanted >= length]
        if not fitting:
            raise BatchError(
                f"a sequence of {length} is longer than the longest of lengths={self.lengths}",
                do="add a length, or shorten sequences before they are batched",
            )
        return fitting[0]

    def _longest(
        self, length: int | None, number: int, device: torch.device | None, failed: bool = False
    ) -> int:
        """The longest over ranks; None: this rank's loader has ended."""
        if not self.agree or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            return length or 0
        state = torch.tensor(
            [length or 0, length is None, length is not None, failed],
            device=_communicating(device, self.group),
        )
        dist.all_reduce(state, dist.ReduceOp.MAX, self.group)
        longest, some_ended, some_go_on, some_failed = state.tolist()
        if some_failed and not failed:
            raise BatchError(f"another rank's batch {number} cannot be padded; it says why")
        if some_ended and some_go_on:
            raise BatchError(
                f"{'this' if length is None else 'another'} rank's loader ended after "
                f"{number if length is None else number - 1} batches, and not every rank's did",
                why="a step takes a part of the batch from every rank",
                do="use a sampler that gives every rank the same number of batches (drop_last=True)",
            )
        return longest

    def _pad(self, path: str, leaf: Any, length: int, longest: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.shape[1] != length:
            return leaf
        behind = [0, 0] * (leaf.dim() - 2)
        return F.pad(leaf, [*behind, 0, longest - length], value=self._fill(path, leaf))

    def _fill(self, path: str, leaf: torch.Tensor) -> float:
        name = path.rpartition(".")[2]
        for key in (path, name):
            if key in self.fills:
                return self.fills[key]
        counts = not leaf.is_floating_point() and leaf.dtype != torch.bool
        if not name.isidentifier() and counts:
            raise BatchError(
                f"the integer tensor at {path!r} of the batch has no name",
                why="token ids are padded with a token, labels with the index that a loss ignores",
                do=f"pass fills={{{path!r}: ...}}, or use batches that are dicts",
            )
        if name in _LABELS or name.endswith(("_labels", "_targets")):
            return self.ignore_index if counts else 0
        if name in _TOKENS or (name.endswith("_ids") and name not in _OTHER_IDS):
            return self.pad_token_id
        return 1 if name.endswith("padding_mask") else 0


def _length(pairs: list[tuple[str, Any]]) -> int:
    """The length of a batch's sequences."""
    for path, leaf in pairs:
        if "mask" in path.rpartition(".")[2] and isinstance(leaf, torch.Tensor) and leaf.dim() > 2:
            raise BatchError(
                f"{path} is a mask of shape {list(leaf.shape)}: pad_batches pads dimension 1 only",
                do="give masks of (rows, length), or pad this one in the collate function",
            )
    sizes = {
        path: leaf.shape[1]
        for path, leaf in pairs
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1
    }
    named = {p: size for p, size in sizes.items() if p.rpartition(".")[2] in _SEQUENCES}
    found = named or sizes
    if not found:
        raise BatchError(
            "no tensor of the batch has a sequence: dimension 1 of two or more",
            do="pad_batches takes batches of (rows, length, ...) tensors",
        )
    if len(set(found.values())) > 1:
        raise BatchError(
            "the tensors of the batch disagree on the length, which is dimension 1: "
            + ", ".join(f"{path} has {size}" for path, size in found.items()),
            do="pad them to one length in the collate function",
        )
    return next(iter(found.values()))


def _communicating(device: torch.device | None, group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor must be for the group's ranks to exchange it: with the batch, if they can."""
    device = device or torch.get_default_device()
    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    if device.type in kinds:
        return device
    return torch.accelerator.current_accelerator() or device
