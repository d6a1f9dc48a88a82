"""A bug that is planted in a pass is found, and the pass is named. A pass without one fails here."""

from __future__ import annotations

import functools
from itertools import product

import pytest

from stepgraph import pipeline
from stepgraph.equivalence.check import check_model
from stepgraph.pipeline import ROADS
from tests.equivalence.planted import BESIDE_THE_PASS, CASES, PASSES, PLANTED, after, struck
from tests.sampling import sampled
from tests.support import adamw

ROOMS = (
    *pipeline.FORMED,
    *pipeline.PLACED,
    *pipeline.REMEMBERED,
    *pipeline.SCHEDULED,
    *pipeline.BOUND,
    *pipeline.TARGETED,
    *pipeline.LOWERED,
)
# The passes that each program goes through, once it has its name.
PROGRAMS = {
    "step": (*pipeline.SIMPLIFIED, *pipeline.UPDATED, *ROOMS),
    "accumulate": (*pipeline.ACCUMULATED, *ROOMS),
    "evaluate": (*pipeline.SIMPLIFIED, *ROOMS),
    "gradients": (*pipeline.SIMPLIFIED, *pipeline.REDUCED, *ROOMS),
    "update": (*pipeline.UPDATED_ALONE, *ROOMS),
}
ALL = {step.name for road in ROADS.values() for step in road}
GRAPH_BY_GRAPH = {
    step.name for name, road in ROADS.items() if name.startswith("graph") for step in road
} - {step.name for name, road in ROADS.items() if not name.startswith("graph") for step in road}


@functools.cache
def checked(case, program, bug=None):
    """The report on one program of a case, with a bug that strikes it alone."""
    make, settings = CASES[case]
    if program == "accumulate":
        settings = {"micro_batches": 2} | settings
    model, batch = make()
    replaced = {}
    if bug is not None:
        beside = bug in BESIDE_THE_PASS[program]
        wrong = after(struck)(bug) if beside else PLANTED[bug].bug

        def rewrite(given, **arguments):
            strikes = given.name == program
            return (wrong if strikes else PASSES[bug].rewrite)(given, **arguments)

        replaced[bug] = rewrite
    entry = "step" if program == "accumulate" else program
    return check_model(
        model, optimizer=adamw(model), batch=batch, entries=(entry,), replaced=replaced, **settings
    )


def test_every_pass_of_every_road_has_a_planted_bug():
    assert PLANTED.keys() | GRAPH_BY_GRAPH == ALL


@pytest.mark.parametrize(("case", "program"), sampled(product(CASES, PROGRAMS), every=7))
def test_without_a_bug_all_passes_agree(case, program):
    report = checked(case, program)
    assert report.ok, str(report)


def cells():
    """Each pass in each program that goes through it; all but one of a pass's are slow."""
    through = {step.name: [] for road in PROGRAMS.values() for step in road}
    for program, road in PROGRAMS.items():
        for step in road:
            through[step.name].append(program)
    for number, (name, programs) in enumerate(through.items()):
        turn = number % len(programs)
        yield from sampled([(p, name) for p in programs[turn:] + programs[:turn]], len(programs))


@pytest.mark.parametrize(("program", "name"), list(cells()))
def test_a_planted_bug_is_found_where_it_is(program, name):
    report = checked(PLANTED[name].case, program, name)
    assert report.first_difference == name, str(report)
    assert next(check for check in report.passes if not check.ok).program == program
