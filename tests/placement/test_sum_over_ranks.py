"""sum_over_ranks: a loss that a graph makes of its rows becomes the global batch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stepgraph.placement.losses import OWN_LOSS, sum_over_ranks
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
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


def collectives(program, phase):
    return sum(map(is_collective, program.operations(phase)))


def test_sums_and_counts_of_tokens_are_those_of_all_ranks():
    before = graph_program(tokens, scores(), LABELS)
    after = sum_over_ranks(before.copy(), TWO, ROWS)
    assert_golden(__file__, "sum_over_ranks", before, after)
    assert (collectives(after, FORWARD), collectives(after, BACKWARD)) == (2, 1)


@pytest.mark.parametrize("name", MEANS)
def test_totals_are_added_up(name):
    function, expected = MEANS[name]
    program = sum_over_ranks(graph_program(function, scores()), TWO, ROWS)
    assert (collectives(program, FORWARD), collectives(program, BACKWARD)) == expected
    check_invariants(program)


@pytest.mark.parametrize("name", OWN)
def test_what_does_not_add_up_is_each_ranks_own_and_says_so(name):
    program = sum_over_ranks(graph_program(OWN[name], scores()), TWO, ROWS)
    assert not collectives(program, None)
    assert any(note.startswith(OWN_LOSS) for note in program.notes)


def test_activations_are_left_alone():
    program = sum_over_ranks(graph_program(lambda y: y.exp(), scores()), TWO, ROWS)
    assert not collectives(program, None) and not program.notes


def test_inputs_that_are_no_rows_are_not_cut():
    program = sum_over_ranks(graph_program(lambda y: y.mean(), scores()), TWO, 3)
    assert not collectives(program, None)
