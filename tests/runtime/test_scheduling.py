"""Threads that communicate go before those that compute, where the system allows it."""

import os

import pytest

from stepgraph import torch_internals
from stepgraph.cli.launcher import launch
from stepgraph.runtime.ranks import communication_first, join_ranks

HOST = torch_internals.host_device()
pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setscheduler"), reason="this system has no such policies"
)


def allowed():
    with communication_first(HOST.type) as first:
        return first


def policies(mesh):
    """On a rank: the policies of the threads that gloo started, and this thread's."""
    join_ranks(mesh, HOST)
    found = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            if "gloo" in file.read():
                found.append(os.sched_getscheduler(int(thread)))
    return found, os.sched_getscheduler(0)


@pytest.mark.skipif(not allowed(), reason="needs CAP_SYS_NICE")
@pytest.mark.parametrize("mesh", ["dp=2", "dp=1,tp=2"])
def test_every_group_of_a_mesh_goes_first_and_what_computes_does_not(mesh):
    for groups, own in launch(policies, mesh, ranks=2):
        assert groups and set(groups) == {os.SCHED_RR}
        assert own == os.SCHED_OTHER


def test_where_it_is_not_allowed_nothing_changes(monkeypatch):
    def refuse(*given):
        raise PermissionError

    before = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(KeyError) as error, communication_first(HOST.type) as first:
        assert not first
        raise KeyError
    assert error.value.__context__ is None
    assert os.sched_getscheduler(0) == before


def test_a_policy_that_somebody_chose_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *given: pytest.fail("it was changed"))
    with communication_first(HOST.type) as first:
        assert not first


def test_this_threads_policy_is_restored_after_an_error():
    before = os.sched_getscheduler(0)
    with pytest.raises(KeyError), communication_first(HOST.type):
        raise KeyError
    assert os.sched_getscheduler(0) == before


def test_beside_an_accelerator_nothing_is_done():
    with communication_first("cuda") as first:
        assert not first and os.sched_getscheduler(0) == os.SCHED_OTHER
