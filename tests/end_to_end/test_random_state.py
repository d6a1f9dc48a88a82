"""Random Python state, buffers, regions and parts: equal to plain PyTorch, or a clear error."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.cli.launcher import launch
from tests.end_to_end.random_state import (
    CHANGES,
    KINDS,
    REGIONS,
    Case,
    run,
    run_on_ranks,
    run_part,
)

LAYERS = st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(REGIONS))
CASES = st.builds(
    Case,
    st.lists(LAYERS, min_size=1, max_size=4).map(tuple),
    st.lists(st.sampled_from(CHANGES), min_size=3, max_size=3).map(tuple),
    st.integers(0, 5),
)
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
MANY = settings(derandomize=True, deadline=None, max_examples=200)


def holds(how, apart):
    assert not apart and (how == "equal" or how.endswith("Error")), (how, apart)


@pytest.mark.slow
@given(case=CASES)
def test_steps_are_those_of_plain_pytorch_or_an_error(case):
    holds(*run(case))


@pytest.mark.slow
@given(case=CASES)
def test_parts_are_those_of_plain_pytorch_or_an_error(case):
    holds(*run_part(case))


@pytest.mark.slow
@MANY
@given(case=CASES)
def test_many_steps(case):
    holds(*run(case))


@pytest.mark.slow
@MANY
@given(case=CASES)
def test_many_parts(case):
    holds(*run_part(case))


@pytest.mark.slow
def test_many_steps_on_two_ranks():
    """Of what is captured whole: graph by graph, statistics are a rank's own, which is said."""
    chosen, whole = random.Random(0), sorted(set(KINDS) - {"Branch"})
    cases = [
        Case(
            tuple(
                (chosen.choice(whole), chosen.choice(REGIONS)) for _ in range(chosen.randint(1, 4))
            ),
            tuple(chosen.choice(CHANGES) for _ in range(3)),
            chosen.randint(0, 5),
        )
        for _ in range(60)
    ]
    for found in launch(run_on_ranks, cases, ranks=2):
        for case, result in zip(cases, found, strict=True):
            assert not result[1], (case, result)
