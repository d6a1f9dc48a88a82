"""What an evaluation graph by graph returns: the global batch's, or the mean of ranks' own, as it says."""

from __future__ import annotations

import os

import pytest
import torch

import stepgraph
from stepgraph.cli.launcher import launch
from tests.end_to_end.test_balance import Model

pytestmark = pytest.mark.xdist_group(__name__)
outside, graph_break = torch._dynamo.disable, torch._dynamo.graph_break


@outside
def counted(w):
    return int((w > 0.3).sum())


@outside
def times(value, by):
    return value * by


@outside
def larger(value, other):
    return value if value > other else other


@outside
def as_it_is_on_some(total, w):
    return total * 1.0 if (w > 0.8).any() else total


def a_total_beside_what_is_made_of_it(model, y, w):
    total, count = y.square().sum(), (w > 0.5).sum()
    return total, total / count, count


def a_total_and_then_what_is_made_of_it(model, y, w):
    total, count = y.square().sum(), (w > 0.5).sum()
    graph_break()
    return total, total / count


def views_of_a_total_beside_rows_less_it(model, y, w):
    total = y.square().sum(0)
    graph_break()
    first, apart = total[0], (y - total).square().sum()
    graph_break()
    return first, apart


def sums_means_and_maxima(model, y, w):
    graph_break()
    return y.sum(0), y.mean(), y.amax(0), (w > 0.5).sum(), (y * w[:, None]).sum() / w.sum(), y


def read_by_two_graphs(model, y, w):
    total = y.square().sum()
    graph_break()
    first = total / w.sum()
    graph_break()
    return first, total * first


def over_a_number_that_code_made(model, y, w):
    count = counted(w)
    return y.square().sum() / count


def shifted_by_a_number_that_code_made(model, y, w):
    count = counted(w)
    return (y + count).square().sum()


def over_an_attribute_that_code_made(model, y, w):
    model.count = counted(w)
    graph_break()
    return y.square().sum() / model.count


def over_the_length_of_a_list(model, y, w):
    many = times([0], counted(w))
    return y.square().sum() / len(many)


def times_a_number_outside(model, y, w):
    return times(y.square().sum(), 3)


def a_vector_over_a_count_outside(model, y, w):
    return times(y.square().sum(0), 1 / counted(w))


def the_larger_of_a_count(model, y, w):
    return larger((w > 0.5).sum().float(), torch.tensor(2.0))


def made_outside_on_one_rank(model, y, w):
    return as_it_is_on_some(y.square().sum(), w)


def a_softmax_over_rows_of_a_total(model, y, w):
    total = y.square().sum()
    graph_break()
    return ((y.sum(1) / total).softmax(0) * w).sum()


WHOLE = (
    a_total_beside_what_is_made_of_it, a_total_and_then_what_is_made_of_it, sums_means_and_maxima,
    views_of_a_total_beside_rows_less_it, read_by_two_graphs,
)  # fmt: skip
OWN = (
    over_a_number_that_code_made, shifted_by_a_number_that_code_made, over_an_attribute_that_code_made,
    over_the_length_of_a_list, times_a_number_outside, a_vector_over_a_count_outside,
    the_larger_of_a_count, made_outside_on_one_rank, a_softmax_over_rows_of_a_total,
)  # fmt: skip


def batch():
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([0.1, 0.6, 0.2, 0.55, 0.7, 0.9, 0.6, 0.4])
    return torch.randn(8, 4, generator=generator), weights


def made():
    torch.manual_seed(0)
    return Model()


def run():
    """One rank: what evaluations return, each two times, and the notes."""
    rank, found = int(os.environ["RANK"]), []
    x, weights = (part.chunk(2)[rank] for part in batch())
    for way in CASES:
        engine = stepgraph.Engine(
            made(), loss=lambda m, b, way=way: way(m, m(b[0]), b[1]), plan="zero3", lowering="eager"
        )
        twice = [engine.evaluate((x, weights)) for _ in range(2)]
        found.append((twice, [note for note in engine.notes if "own" in note]))
    return found


CASES = WHOLE + OWN


@pytest.fixture(scope="module")
def found():
    return [dict(zip(CASES, rank, strict=True)) for rank in launch(run, ranks=2)]


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("way", CASES, ids=lambda way: way.__name__)
def test_an_evaluation_is_that_of_one_process_or_the_mean_of_ranks_own(way, found):
    model, (x, weights) = made().eval(), batch()
    with torch.no_grad():
        wanted = tensors(way(model, model(x), weights))
        if way in OWN:
            parts = zip(x.chunk(2), weights.chunk(2), strict=True)
            own = [tensors(way(model, model(part), weight)) for part, weight in parts]
            assert not torch.allclose(sum(one[0] for one in own) / 2, wanted[0])  # they differ
            wanted = tuple((one + other) / 2 for one, other in zip(*own, strict=True))
    for rank in found:
        twice, notes = rank[way]
        for result in twice:
            torch.testing.assert_close(tensors(result), wanted)
        assert bool(notes) == (way in OWN), notes
