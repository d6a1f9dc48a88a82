"""What two short steps say of a deep one: a line, and how surely."""

from dataclasses import replace

import pytest

from stepgraph.cost.collectives import collective_seconds, links
from stepgraph.cost.devices import find_device
from stepgraph.cost.predict import Prediction
from stepgraph.cost.short_steps import ShortSteps
from stepgraph.runtime.ranks import parse_mesh

WIRES = links(parse_mesh("dp=16"), find_device("h100"))
SHORT = ShortSteps(({}, {}), steps=10)
KEY = ("backward", "all_reduce", "dp")


def predictions(calls: tuple[int, int], sent: tuple[int, int]) -> list[Prediction]:
    """Of a step of two layers and one of four: 300 and 500 ms, 100 and 140 bytes."""
    few = Prediction("h100", 300.0, 300.0, 0.0, 0.0, 0.5, 100, 80, 100, {})
    more = replace(few, step_ms=500.0, peak_bytes=140)
    return [
        replace(one, collectives_by_dim={KEY: {"count": count, "bytes": size}})
        for one, count, size in zip((few, more), calls, sent, strict=True)
    ]


def test_a_deep_step_lies_on_the_line_of_two_short_ones():
    said = SHORT.say(*predictions((2, 4), (10**6, 2 * 10**6)), WIRES)
    assert said.whole.step_ms == 2300 and said.whole.peak_bytes == 500
    assert said.exact and said.least_ms == pytest.approx(2300, rel=0.003)


@pytest.mark.parametrize(("size", "exact"), [(10**8, False), (10**4, True)])
def test_what_is_sent_for_all_layers_at_once_may_take_no_time_in_the_whole(size, exact):
    said = SHORT.say(*predictions((1, 1), (size, 2 * size)), WIRES)
    at_most = 1e3 * float(collective_seconds("all_reduce", 11 * size, WIRES["dp"]))
    assert said.exact == exact == (at_most < 2300 * 0.002)
    assert said.least_ms == pytest.approx(max(2300 / 1.1, 2300 / 1.002 - at_most))


def test_what_is_sent_once_however_deep_the_step_is_says_nothing():
    said = SHORT.say(*predictions((1, 1), (10**9, 10**9)), WIRES)
    assert said.exact
