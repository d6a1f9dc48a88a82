"""Random numbers as a pure function of (seed, step, operation, position): Philox-4x32-10.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no
state: the bits of an element are a hash of where it stands. The position is that in the *whole* tensor
of the global batch, so ranks, micro-batches and recomputation cannot change a mask.

One node, ``stepgraph::random``, in every Program and both lowerings. Its bits are integer arithmetic,
which a compiler may take apart and fuse (:func:`fused_random`); normals and exponentials need log and
cos, whose kernels differ, so they stay one opaque operation.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
RANKS_APART = (
    0x9E3779B97F4A7  # what ranks whose generators are alike add to the words that they draw
)
_CHUNK = 2**15  # elements: the rounds' temporaries stay in cache

BITS, NORMAL, EXPONENTIAL = "bits", "normal", "exponential"


def seed_words(seed: int, step: int, micro_batch: int) -> torch.Tensor:
    """The value of a program's ``Seed`` input; any integer is a seed, modulo 2^64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    return torch.tensor([signed, step, micro_batch])


def host_seed(seed: int, step: int, micro_batch: int) -> int:
    """The value of a program's ``HostSeed`` input: one number below 2^63, of all three."""
    words = f"{seed % 2**64} {step} {micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Philox-4x32-10 of a counter of four words under a key of two, each an int64 tensor below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Wraps modulo 2^64, which keeps both 32-bit halves of the product right.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32 & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def _positions(
    seed: torch.Tensor,
    sizes: Sequence[int],
    whole: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """Row-major positions in the whole tensor of a part's elements; shape ``sizes``, int64."""
    found = torch.zeros([1] * len(sizes), dtype=torch.int64, device=seed.device)
    stride = 1
    for dim in reversed(range(len(sizes))):
        along = torch.arange(sizes[dim], device=seed.device)
        if rows and rows[0] == dim:
            _, ranks, micro_batches, blocks = rows
            block, each = sizes[dim] // blocks, sizes[dim] // blocks // ranks
            inside = along % block
            along = along // block * (block * micro_batches) + seed[2] * each
            along = along + inside // each * (each * micro_batches) + inside % each
        along = (along + starts[dim]) * stride
        found = found + along.view([-1] + [1] * (len(sizes) - 1 - dim))
        stride *= whole[dim]
    return found if len(seed) < 5 else found + seed[4]


def offset_of(whole: Sequence[int], starts: Sequence[int]) -> int:
    """The position at which a part begins."""
    offset, stride = 0, 1
    for size, start in zip(reversed(whole), reversed(starts), strict=True):
        offset, stride = offset + start * stride, stride * size
    return offset


def _words(seed: torch.Tensor, operation: int, positions: torch.Tensor, rows: Sequence[int]):
    high = positions >> 32
    if not rows:  # the rows of the batch are not known: every micro-batch draws its own
        high = high + (seed[2] << 16)
    counter = (
        positions & _MASK,
        high & _MASK,
        torch.full_like(seed[0], operation) if len(seed) == 3 else seed[3] + operation,
        seed[1] & _MASK,
    )
    return philox(counter, (seed[0] & _MASK, seed[0] >> 32 & _MASK))


def _finish(kind: str, words: Sequence[torch.Tensor]) -> torch.Tensor:
    if kind == BITS:
        return words[0]
    first, second = ((word.double() + 0.5) * 2.0**-32 for word in words[:2])
    if kind == EXPONENTIAL:
        return (-first.log()).float()
    return ((-2.0 * first.log()).sqrt() * (second * (2 * torch.pi)).cos()).float()


@torch.library.custom_op("stepgraph::random", mutates_args=())
def random(
    seed: torch.Tensor,
    kind: str,
    operation: int,
    sizes: Sequence[int],
    whole: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[int],
    shards: str,
) -> torch.Tensor:
    """Random numbers at the positions of one part of a tensor.

    Args:
        seed: int64 of shape (3,): the run's seed, the step, the micro-batch; or (5,): what is added to
            ``operation`` and to each position, too.
        kind: ``bits`` (int64 below 2^32), ``normal`` or ``exponential`` (float32, of scale 1).
        operation: tells operations apart; copies of one (recomputation) share it.
        sizes: shape of the part.
        whole: shape of the whole tensor, over ranks and micro-batches.
        starts: where the part begins.
        rows: (dimension of the batch, ranks whose rows this part holds, micro-batches, blocks: how often
            the batch repeats along the dimension), or empty.
        shards: ``"0:dp 1:tp"``: mesh dimensions that it is sharded along; binding to a rank turns
            them into ``starts``.

    Returns:
        shape ``sizes``.
    """
    assert not shards, "random must be bound to a rank before it runs"
    positions = _positions(seed, sizes, whole, starts, rows)
    parts = [
        _finish(kind, _words(seed, operation, chunk, rows))
        for chunk in positions.reshape(-1).split(_CHUNK)
    ]
    return torch.cat(parts).view(list(sizes))


@random.register_fake
def _(seed, kind, operation, sizes, whole, starts, rows, shards):
    dtype = torch.int64 if kind == BITS else torch.float32
    return seed.new_empty(list(sizes), dtype=dtype)


RANDOM = torch.ops.stepgraph.random.default


def fused_random(seed, kind, operation, sizes, whole, starts, rows, shards):
    """The decomposition of ``random`` for a compiler that fuses: the same bits, element by element."""
    if kind != BITS:
        return NotImplemented
    positions = _positions(seed, sizes, whole, starts, rows)
    return _words(seed, operation, positions, rows)[0]


def bound_to(node: fx.Node, coordinate: dict[str, int], sizes: dict[str, int]) -> tuple:
    """The arguments of a ``random`` node on one rank: its ``shards`` become ``starts``.

    Args:
        coordinate: of the rank, by mesh dimension.
        sizes: of the mesh dimensions.
    """
    seed, kind, operation, part, whole, starts, rows, shards = node.args
    starts = list(starts)  # type: ignore[arg-type]
    index = [0] * len(starts)
    for entry in str(shards).split():
        dim, _, name = entry.partition(":")
        index[int(dim)] = index[int(dim)] * sizes[name] + coordinate[name]
    for dim, position in enumerate(index):
        each = part[dim]  # type: ignore[index]
        if rows and rows[0] == dim:  # type: ignore[index]
            each *= rows[2]  # type: ignore[index,operator]
        starts[dim] += position * each  # type: ignore[operator]
    return (seed, kind, operation, part, whole, starts, rows, "")
