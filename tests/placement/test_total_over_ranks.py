"""total_over_ranks: results of graphs without a backward become those of the global batch."""

from __future__ import annotations

import torch

from stepgraph.placement.normalisation import Totals
from stepgraph.placement.results import total_over_ranks, totals_of
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
from tests.graph_support import TWO, graph_program
from tests.support import assert_golden


def results(x, weight):
    total = x.sum()
    return x * weight, total, x.mean(), x.amax(0), total / (x > 0).sum()


def program():
    return graph_program(results, torch.ones(4, 3), torch.ones(4, 1))


def test_the_text_shows_totals_added_up():
    before = program()
    after = total_over_ranks(before.copy(), TWO, totals_of(before, [], 4))
    assert_golden(__file__, "total_over_ranks", before, after)
    check_invariants(after, "total_over_ranks")
    assert sum(map(is_collective, after.operations())) == 4  # the total once for both that read it


def test_inputs_that_may_be_rows_or_not_add_up_nothing_and_it_is_said():
    before = program()
    totals = totals_of(before, ["hidden"], 4)
    after = total_over_ranks(before.copy(), TWO, totals)
    assert not any(map(is_collective, after.operations()))
    assert any("not known whether hidden is rows" in note for note in after.notes)


def test_rows_alone_need_no_word():
    rows = graph_program(lambda x: x * 2, torch.ones(4, 3))
    assert totals_of(rows, ["hidden"], 4) == Totals()
