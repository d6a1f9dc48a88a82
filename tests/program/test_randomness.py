"""The generator: published known answers, positions, statistics."""

import math

import pytest
import torch

from stepgraph.program import randomness
from stepgraph.program.randomness import RANDOM, fused_random, philox, seed_words

SEED = seed_words(7, 3, 0)


def draw(sizes, *, kind="bits", seed=SEED, operation=5, whole=None, starts=None, rows=()):
    starts = starts or [0] * len(sizes)
    return RANDOM(seed, kind, operation, sizes, whole or sizes, starts, list(rows), "")


# kat_vectors of Random123 (D. E. Shaw Research): counter, key, result.
@pytest.mark.parametrize(
    "counter, key, result",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_the_published_known_answers(counter, key, result):
    words = [torch.tensor(int(word, 16)) for word in counter.split()]
    keys = [torch.tensor(int(word, 16)) for word in key.split()]
    assert [f"{word.item():08x}" for word in philox(words, keys)] == result.split()


def test_a_part_has_the_bits_of_the_whole():
    whole = draw([6, 4, 10])
    part = draw([3, 2, 5], whole=[6, 4, 10], starts=[3, 2, 5])
    assert torch.equal(part, whole[3:, 2:, 5:])


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_micro_batches_of_ranks_have_the_rows_of_the_whole(batch_dim):
    """Two ranks of six rows each, cut in three micro-batches of two."""
    whole = draw([12, 5] if batch_dim == 0 else [5, 12])
    sizes = [4, 5] if batch_dim == 0 else [5, 4]
    for number in range(3):
        got = draw(
            sizes,
            seed=seed_words(7, 3, number),
            whole=list(whole.shape),
            rows=[batch_dim, 2, 3, 1],
        )
        first = torch.arange(2 * number, 2 * number + 2)
        assert torch.equal(got, whole.index_select(batch_dim, torch.cat([first, first + 6])))


def test_without_known_rows_each_micro_batch_draws_its_own():
    one, two = (draw([64], seed=seed_words(7, 3, number)) for number in (0, 1))
    assert not (one == two).any()


@pytest.mark.parametrize("sizes", [[], [1], [0, 3], [70_000], [3, 1, 40_000]])
def test_compiled_and_chunked_have_the_same_bits(sizes):
    got = draw(sizes)
    assert got.shape == torch.Size(sizes)
    fused = fused_random(SEED, "bits", 5, sizes, sizes, [0] * len(sizes), [], "")
    assert torch.equal(got, fused.expand(sizes))


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**70 + 5])
def test_any_integer_is_a_seed(seed):
    assert torch.equal(
        draw([8], seed=seed_words(seed, 0, 0)), draw([8], seed=seed_words(seed % 2**64, 0, 0))
    )


def chi_squared(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations of its distribution (mean k - 1, variance 2 (k - 1)), for many cells."""
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_bits_fill_their_range_evenly():
    counts = torch.bincount(draw([2**20]) >> 24, minlength=256).double()
    assert abs(chi_squared(counts, torch.full((256,), 2.0**12, dtype=torch.float64))) < 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: draw([2**18], operation=6),
        lambda: draw([2**18], seed=seed_words(7, 4, 0)),
        lambda: draw([2**18], seed=seed_words(8, 3, 0)),
        lambda: draw([2**18], whole=[2**19], starts=[2**18]),
        lambda: draw([2**18], seed=seed_words(7, 3, 1)),
    ],
    ids=["operation", "step", "seed", "shard", "micro_batch"],
)
def test_streams_are_independent(other):
    """Pairs of 4-bit digits, one of each stream, fall evenly into 256 cells."""
    pairs = (draw([2**18]) >> 28) * 16 + (other() >> 28)
    counts = torch.bincount(pairs, minlength=256).double()
    assert abs(chi_squared(counts, torch.full((256,), 2.0**10, dtype=torch.float64))) < 4


def test_normals_and_exponentials_have_their_moments():
    count = 2**20
    normal, exponential = (draw([count], kind=kind).double() for kind in ("normal", "exponential"))
    four_sigma = 4 / math.sqrt(count)
    assert abs(normal.mean()) < four_sigma
    assert abs(normal.var() - 1) < four_sigma * math.sqrt(2)
    assert abs((normal**4).mean() - 3) < four_sigma * math.sqrt(96)
    assert exponential.min() > 0
    assert abs(exponential.mean() - 1) < four_sigma
    assert abs((exponential**2).mean() - 2) < four_sigma * math.sqrt(20)


def test_an_unbound_part_does_not_run():
    with pytest.raises(AssertionError, match="bound to a rank"):
        RANDOM(SEED, randomness.BITS, 0, [2], [4], [0], [], "0:dp")
