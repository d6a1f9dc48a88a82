"""sum_over_ranks: a loss that a graph makes of its rows becomes the global batch's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

from stepgraph.analysis.rows import Given
from stepgraph.analysis.sums import Sums, decide_sums
from stepgraph.placement.passes.sum_over_ranks import sum_over_ranks
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
PENDING = {
    "avg": lambda y: y.square().mean(),
    "sum": lambda y: y.square().sum(),
}
OWN = {
    "divided by a number": lambda y: y.square().sum() / len(y),
    "a maximum": lambda y: y.max(),
    "two weighted means": lambda y: (y.sum() / (y > 0).sum(), y.sum() / (y < 0).sum()),
    "made of numbers that a table counts": lambda y: y.sum() / torch.ones(len(y)).sum(),
    "a penalty over a count": lambda y: (y.sum() + y.new_ones(()).exp()) / (y > 0).sum().clamp(1),
}


def summed(program, rows=ROWS, **known):
    return sum_over_ranks(program, TWO, decide_sums(program, rows, **known))


def reads_a_collective(node):
    return is_collective(node) or any(map(reads_a_collective, node.all_input_nodes))


def collectives(program, phase):
    return sum(map(is_collective, program.operations(phase)))


def test_sums_and_counts_of_tokens_are_those_of_all_ranks():
    before = graph_program(tokens, scores(), LABELS)
    after = summed(before.copy())
    assert_golden(__file__, "sum_over_ranks", before, after)
    assert (collectives(after, FORWARD), collectives(after, BACKWARD)) == (2, 1)


def test_totals_are_added_up():
    def weighted(y):
        return (y.sum(1) * y.detach()[:, 0]).sum() / y.detach().sum()

    program = summed(graph_program(weighted, scores()))
    assert (collectives(program, FORWARD), collectives(program, BACKWARD)) == (2, 1)
    check_invariants(program)


@pytest.mark.parametrize("kind", PENDING)
def test_sums_and_means_stay_pending(kind):
    program = graph_program(PENDING[kind], scores())
    assert decide_sums(program, ROWS) == Sums(results={0: Partial(kind)})


@pytest.mark.parametrize("name", OWN)
def test_what_does_not_add_up_is_each_ranks_own(name):
    sums = decide_sums(graph_program(OWN[name], scores()), ROWS)
    assert sums.loss is None and not sums.totals
    assert {type(how) for how in sums.results.values()} == {Apart}


def test_activations_are_left_alone():
    program = summed(graph_program(lambda y: y.exp(), scores()))
    assert not collectives(program, None) and not program.notes


def test_inputs_that_are_no_rows_are_not_cut():
    sums = decide_sums(graph_program(lambda y: y.mean(), scores()), 3)
    assert isinstance(sums.results[0], Apart)


# -- results without a gradient


def results(x, weight):
    total = x.sum()
    return x * weight, total, x.mean(), x.amax(0), total / (x > 0).sum()


HALVES = torch.ones(4, 3), torch.ones(3)


def evaluation():
    return graph_program(results, torch.ones(4, 3), torch.ones(4, 1))


def test_what_results_without_a_gradient_need_whole_is_added_up():
    before = evaluation()
    after = summed(before.copy(), evaluates=True)
    assert_golden(__file__, "sums_without_a_backward", before, after)
    check_invariants(after)
    assert collectives(after, None) == 2  # of the quotient; what may wait is left pending


def test_inputs_that_may_be_rows_or_not_add_up_nothing_and_it_is_said():
    after = summed(evaluation(), unknown=["hidden"], evaluates=True)
    assert not collectives(after, None)
    assert any("not known whether hidden is rows" in note for note in after.notes)


def test_rows_alone_need_no_word():
    rows = graph_program(lambda x: x * 2, torch.ones(4, 3))
    assert decide_sums(rows, 4, unknown=["hidden"], evaluates=True) == Sums()


def test_an_evaluation_adds_up_what_a_graph_before_it_left_pending_for_whoever_reads_it():
    before = graph_program(lambda x, total: ((x - total).square().sum(1), total * 2), *HALVES)
    rows, total = (role for role in before.inputs if isinstance(role, roles.UserInput))
    known = {rows: Shard(0), total: Partial("sum")}
    sums = decide_sums(before, 4, known, evaluates=True)
    assert sums.results == {0: Shard(0), 1: Replicate()}
    after = sum_over_ranks(before.copy(), TWO, sums)
    check_invariants(after)
    assert collectives(after, None) == 1
    given = decide_sums(before, 4, known, evaluates=True, given=Given(handed=True))
    assert not given.totals and [*map(type, given.results.values())] == [Apart, Apart]


@pytest.mark.parametrize(
    ("function", "is_own"),
    [
        (lambda x: x.sum() / 3, True),
        (lambda x: (x * 0.3).sum(), True),
        (lambda x: (x.sum() + 3) / x.amax(), True),
        (lambda x: x.sum() / x.abs().sum(), False),
        (lambda x: x.square().sum(), False),
        (lambda x: x.mean() * 3, True),
    ],
)
def test_a_sum_and_numbers_that_code_hands_to_a_graph_are_each_ranks_own(function, is_own):
    program = graph_program(function, torch.ones(4, 5))
    assert not isinstance(decide_sums(program, 4, evaluates=True).results[0], Apart)
    found = decide_sums(program, 4, evaluates=True, given=Given(handed=True))
    assert isinstance(found.results[0], Apart) == is_own and bool(found.notes) == is_own


def beside(y):
    kept = y[:, 0] > 0
    count = kept.sum()
    return (y.square().sum(1) * kept).sum(), count, count.clamp(min=1), y.detach().amax(0), y.sum(0)


def test_a_graph_in_training_leaves_sums_pending():
    program = graph_program(beside, scores())
    kinds = [Partial("sum"), Partial("sum"), Apart(""), Partial("max"), Partial("sum")]
    assert decide_sums(program, ROWS) == Sums(results=dict(enumerate(kinds)))


def test_a_graph_adds_up_what_one_before_it_left_pending():
    program = graph_program(lambda s, n: s / n.clamp(min=1), scores().sum(), torch.tensor(3))
    total, count = (role for role in program.inputs if isinstance(role, roles.UserInput))
    sums = decide_sums(program, ROWS, {total: Partial("sum"), count: Partial("sum")})
    assert sums.loss is not None and sums.results == {0: Replicate()}
    after = sum_over_ranks(program, TWO, sums)
    check_invariants(after)
    assert (collectives(after, FORWARD), collectives(after, BACKWARD)) == (2, 1)


def test_a_loss_of_unknown_inputs_is_own():
    sums = decide_sums(graph_program(tokens, scores(), LABELS), ROWS, unknown=["mask"])
    assert sums.loss is None and "whether mask is rows" in sums.results[0].reason


def test_a_loss_of_what_all_ranks_have_is_left_alone():
    program = graph_program(lambda a, b: a + b, *torch.ones(2, requires_grad=True))
    whole = {role: Replicate() for role in program.inputs if isinstance(role, roles.UserInput)}
    sums = decide_sums(program, ROWS, whole)
    assert sums == Sums(results={0: Replicate()})


def test_totals_are_added_up_for_the_loss_alone():
    def average(y):
        count = (y.detach() > 0).sum()
        clamped = count.clamp(min=1)
        return y.sum() / clamped, count, clamped

    program = graph_program(average, scores())
    sums = decide_sums(program, ROWS)
    assert sums.results == {0: Replicate(), 1: Partial("sum"), 2: Replicate()}
    results = sum_over_ranks(program, TWO, sums).results
    assert not reads_a_collective(results[1]) and reads_a_collective(results[2])


def test_a_number_that_rows_are_computed_with_is_each_ranks_own_like_them():
    def scaled(y):
        count = (y.detach() > 0).sum().clamp(min=1)
        return y / count, count

    sums = decide_sums(graph_program(scaled, scores()), ROWS, evaluates=True)
    assert not sums.totals and [*map(type, sums.results.values())] == [Apart, Apart]


def test_a_loss_of_what_is_each_ranks_own_is_own_and_says_what():
    program = graph_program(lambda y, own: (y * own).mean(), scores(), torch.ones(3))
    (own,) = [role for role in program.inputs if "own" in getattr(role, "name", "")]
    assert decide_sums(program, ROWS).results == {0: Partial("avg")}
    sums = decide_sums(program, ROWS, {own: Apart("the mean of a batch was taken")})
    assert "the mean of a batch was taken" in sums.results[0].reason


def test_rows_may_lie_along_any_dimension():
    program = graph_program(lambda y: y.mean(), torch.randn(3, ROWS, requires_grad=True))
    (rows,) = [role for role in program.inputs if isinstance(role, roles.UserInput)]
    assert decide_sums(program, ROWS, {rows: Shard(1)}).results == {0: Partial("avg")}
    turned = graph_program(lambda y: y.transpose(0, 1).exp(), scores())
    assert decide_sums(turned, ROWS).results == {0: Shard(1)}
