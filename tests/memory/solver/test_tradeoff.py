"""One block: what is kept within so many bytes takes least time, by exhaustive search too."""

import itertools

import numpy as np
import pytest

from stepgraph.memory.solver.blocks import Blocks
from stepgraph.memory.solver.tradeoff import Tradeoff, minimise
from stepgraph.operators.views import is_view
from stepgraph.program.metadata import meta
from tests.memory.solver.search_support import llama_program, narrowing, placed, plan_on


def tradeoff_of(program, number=0):
    blocks = Blocks(program, gather_again=True)
    names = {*blocks.dropped(number, frozenset())}
    block = blocks.blocks[number]
    droppable = {node for node in block if meta(node)["name"] in names}
    times = {n: 0.0 if is_view(n) else 1.0 + i % 3 for i, n in enumerate(blocks.nodes)}
    return Tradeoff(block, droppable, blocks.free(number), times)


@pytest.fixture(scope="module")
def small():
    return tradeoff_of(placed(*narrowing(), plan_on("ddp")))


def every_choice(tradeoff):
    for count in range(len(tradeoff.choices) + 1):
        for kept in itertools.combinations(tradeoff.choices, count):
            yield tradeoff.measure(frozenset(kept))


def test_the_least_time_is_that_of_exhaustive_search(small):
    every = list(every_choice(small))
    sizes = sorted({one.bytes for one in every})
    assert len(sizes) > 4
    for size in sizes:
        expected = min(one.seconds for one in every if one.bytes <= size)
        found = small.least_seconds(size)
        assert found.bytes <= size and found.seconds == pytest.approx(expected)
    assert small.least_seconds(-(2**30)) is None


def test_the_fewest_bytes_are_those_of_exhaustive_search(small):
    assert small.least_bytes().bytes == min(one.bytes for one in every_choice(small))


def test_where_all_is_kept_nothing_is_computed_again(small):
    whole = small.measure(None)
    assert (whole.seconds, whole.again) == (0.0, frozenset())
    assert small.measure(frozenset()).bytes < whole.bytes
    assert small.least_seconds(whole.bytes).seconds == 0.0


def test_more_bytes_never_take_more_time():
    tradeoff = tradeoff_of(llama_program())
    sizes = np.linspace(tradeoff.least_bytes().bytes, tradeoff.measure(None).bytes, 7)
    seconds = [tradeoff.least_seconds(size).seconds for size in sizes]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0.0 < seconds[0]


def test_what_nothing_satisfies():
    assert minimise(np.ones(1), [({0: 1.0}, 2.0, np.inf)]) is None
