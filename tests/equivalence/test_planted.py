"""A bug that is planted in a pass is found, and the pass is named. A pass without one fails here."""

from __future__ import annotations

import functools

import pytest

from stepgraph.equivalence.check import check_model
from stepgraph.pipeline import ROADS
from tests.equivalence.planted import CASES, PLANTED
from tests.support import adamw

ALL = {step.name for road in ROADS.values() for step in road}
GRAPH_BY_GRAPH = {
    step.name for name, road in ROADS.items() if name.startswith("graph") for step in road
} - {step.name for name, road in ROADS.items() if not name.startswith("graph") for step in road}


@functools.cache
def checked(case, entry, bug=None):
    make, settings = CASES[case]
    model, batch = make()
    replaced = {bug: PLANTED[bug].bug} if bug else {}
    return check_model(
        model, optimizer=adamw(model), batch=batch, entries=(entry,), replaced=replaced, **settings
    )


def test_every_pass_of_every_road_has_a_planted_bug():
    assert PLANTED.keys() | GRAPH_BY_GRAPH == ALL


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_all_passes_agree(case):
    report = checked(case, "step")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_where_it_is(name):
    planted = PLANTED[name]
    report = checked(planted.case, planted.entry, name)
    assert report.first_difference == name, str(report)
