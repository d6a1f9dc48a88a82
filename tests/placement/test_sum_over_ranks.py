"""sum_over_ranks: a loss that a graph makes of its rows becomes the global batch's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from stepgraph.placement.losses import sum_over_ranks
from stepgraph.placement.sums import OWN_LOSS, Sums, decide_sums
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
from stepgraph.program.layout import Apart
from stepgraph.program.program import BACKWARD, FORWARD
from tests.graph_support import TWO, graph_program
from tests.support import assert_golden

ROWS = 4


def scores():
    return torch.randn(ROWS, 3, requires_grad=True)


def tokens(y, labels):
    return F.cross_entropy(y, labels, ignore_index=0)


LABELS = torch.tensor([0, 1, 2, 1])
MEANS = {
    "a mean": (lambda y: y.square().mean(), (1, 1)),
    "a sum": (lambda y: y.square().sum(), (1, 1)),
    "a weighted mean": (lambda y: (y.sum(1) * y.detach()[:, 0]).sum() / y.detach().sum(), (2, 1)),
}
OWN = {
    "divided by a number": lambda y: y.square().sum() / len(y),
    "a maximum": lambda y: y.max(),
    "two losses": lambda y: (y.mean(), y.square().mean()),
}


def summed(program, rows=ROWS, **known):
    return sum_over_ranks(program, TWO, decide_sums(program, rows, **known))


def collectives(program, phase):
    return sum(map(is_collective, program.operations(phase)))


def test_sums_and_counts_of_tokens_are_those_of_all_ranks():
    before = graph_program(tokens, scores(), LABELS)
    after = summed(before.copy())
    assert_golden(__file__, "sum_over_ranks", before, after)
    assert (collectives(after, FORWARD), collectives(after, BACKWARD)) == (2, 1)


@pytest.mark.parametrize("name", MEANS)
def test_totals_are_added_up(name):
    function, expected = MEANS[name]
    program = summed(graph_program(function, scores()))
    assert (collectives(program, FORWARD), collectives(program, BACKWARD)) == expected
    check_invariants(program)


@pytest.mark.parametrize("name", OWN)
def test_what_does_not_add_up_is_each_ranks_own_and_says_so(name):
    program = summed(graph_program(OWN[name], scores()))
    assert not collectives(program, None)
    assert any(note.startswith(OWN_LOSS) for note in program.notes)


def test_activations_are_left_alone():
    program = summed(graph_program(lambda y: y.exp(), scores()))
    assert not collectives(program, None) and not program.notes


def test_inputs_that_are_no_rows_are_not_cut():
    program = summed(graph_program(lambda y: y.mean(), scores()), 3)
    assert not collectives(program, None)


# -- results without a gradient


def results(x, weight):
    total = x.sum()
    return x * weight, total, x.mean(), x.amax(0), total / (x > 0).sum()


def evaluation():
    return graph_program(results, torch.ones(4, 3), torch.ones(4, 1))


def test_results_of_a_graph_without_a_backward_are_added_up():
    before = evaluation()
    after = summed(before.copy())
    assert_golden(__file__, "sums_without_a_backward", before, after)
    check_invariants(after)
    assert collectives(after, None) == 4  # the total once for both that read it


def test_inputs_that_may_be_rows_or_not_add_up_nothing_and_it_is_said():
    after = summed(evaluation(), unknown=["hidden"])
    assert not collectives(after, None)
    assert any("not known whether hidden is rows" in note for note in after.notes)


def test_rows_alone_need_no_word():
    rows = graph_program(lambda x: x * 2, torch.ones(4, 3))
    assert decide_sums(rows, 4, unknown=["hidden"]) == Sums()


def beside(y):
    kept = y[:, 0] > 0
    count = kept.sum()
    return (y.square().sum(1) * kept).sum(), count, count.clamp(min=1), y.detach().amax(0), y.sum(0)


def test_numbers_beside_a_loss_are_those_of_all_ranks_as_it_is():
    program = graph_program(beside, scores())
    sums = decide_sums(program, ROWS)
    assert sums.loss is not None and len(sums.totals) == 2
    after = sum_over_ranks(program, TWO, sums)
    check_invariants(after)
    assert (collectives(after, FORWARD), collectives(after, BACKWARD)) == (3, 1)
    *whole, column_sums = [sums.results[i] for i in range(5)]
    assert whole == [Replicate()] * 4 and isinstance(column_sums, Apart)  # it has a gradient


def test_a_loss_of_what_all_ranks_have_is_left_alone():
    program = graph_program(lambda a, b: a + b, *torch.ones(2, requires_grad=True))
    whole = {role: Replicate() for role in program.inputs if isinstance(role, roles.UserInput)}
    sums = decide_sums(program, ROWS, whole)
    assert sums == Sums(results={0: Replicate()})


def test_a_total_of_the_loss_is_added_up_once():
    def average(y):
        count = (y.detach() > 0).sum()
        return y.sum() / count, count

    assert collectives(summed(graph_program(average, scores())), FORWARD) == 2


def test_numbers_beside_an_own_loss_are_own():
    program = graph_program(lambda y: (y.max(), (y.detach() > 0).sum()), scores())
    sums = decide_sums(program, ROWS)
    assert sums.loss is None and not sums.totals
    assert isinstance(sums.results[1], Apart)


def test_a_number_that_rows_are_computed_with_is_each_ranks_own_like_them():
    def scaled(y):
        count = (y.detach() > 0).sum().clamp(min=1)
        return y / count, count

    sums = decide_sums(graph_program(scaled, scores()), ROWS)
    assert not sums.totals and [*map(type, sums.results.values())] == [Apart, Apart]


def test_a_loss_of_what_is_each_ranks_own_is_own_and_says_what():
    program = graph_program(lambda y, own: (y * own).mean(), scores(), torch.ones(3))
    (own,) = [role for role in program.inputs if "own" in getattr(role, "name", "")]
    assert decide_sums(program, ROWS).loss is not None
    sums = decide_sums(program, ROWS, {own: Apart("the mean of a batch was taken")})
    assert sums.loss is None and "the mean of a batch was taken" in sums.notes[0]


def test_rows_may_lie_along_any_dimension():
    program = graph_program(lambda y: y.mean(), torch.randn(3, ROWS, requires_grad=True))
    (rows,) = [role for role in program.inputs if isinstance(role, roles.UserInput)]
    assert decide_sums(program, ROWS, {rows: Shard(1)}).loss is not None
    turned = graph_program(lambda y: y.transpose(0, 1).exp(), scores())
    assert decide_sums(turned, ROWS).results == {0: Shard(1)}
