"""A collective that starts in a program and is awaited outside it, or the other way round."""

from stepgraph import torch_internals
from tests.graphs.programs import named

WHY = "its collective starts in one part of the step and is awaited in another"
DO = "remove the obstacle between them"


def started(x):
    return torch_internals.ALL_REDUCE(x, "sum", "dp")


def awaited(x):
    return torch_internals.WAIT(x)


def test_a_start_without_its_wait():
    assert named(started, (4, 4)) == [f"net/all_reduce [net] {WHY}\n(net.py): {DO}"]


def test_a_wait_without_its_start():
    assert named(awaited, (4, 4)) == [f"net/wait_tensor [net] {WHY}\n(net.py): {DO}"]


def test_both_are_none():
    assert not named(lambda x: awaited(started(x)), (4, 4))
