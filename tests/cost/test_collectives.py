"""Collectives: who is wired how, and what a message costs, by hand."""

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.cost.collectives import (
    Group,
    collective_of,
    collective_seconds,
    links,
    ring_seconds,
    tree_seconds,
)
from stepgraph.cost.devices import DEVICES, Link
from stepgraph.program.layout import MeshShape
from tests.cost.hand_made import Written, round_device

KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
MIB = 2**20


def wired(mesh, device=None):
    dims = tuple((part.split("=")[0], int(part.split("=")[1])) for part in mesh.split(","))
    return links(MeshShape(dims), device or round_device())


def test_the_last_dimension_stays_inside_a_node_and_the_first_crosses_nodes():
    groups = wired("dp=16,tp=8")
    assert not groups["tp"].crosses and groups["tp"].ring_bandwidth == 1e8
    assert groups["dp"].crosses and groups["dp"].per_node == 1
    assert groups["dp"].ring_bandwidth == 1e7


def test_members_of_a_group_in_one_node_share_its_network():
    group = wired("dp=16,tp=4")["dp"]  # ranks 0, 4, 8, ...: two in each node of eight
    assert group.per_node == 2 and group.ring_bandwidth == 2e7
    whole = wired("dp=32")["dp"]
    assert whole.per_node == 8 and whole.ring_bandwidth == 8e7


def test_one_node_is_all_intra():
    groups = wired("dp=2,tp=4")
    assert [group.crosses for group in groups.values()] == [False, False]


def test_a_mesh_that_does_not_divide_over_nodes_counts_by_its_worst_group():
    assert wired("dp=4,tp=6")["tp"].per_node == 2  # ranks 6 to 11 are 2 and 4 in their nodes


def test_ring_by_hand():
    group = wired("dp=4")["dp"]
    assert ring_seconds("all_gather", 4e8, group) == pytest.approx(3 * 1e-6 + 3.0)
    assert ring_seconds("all_reduce", 4e8, group) == pytest.approx(2 * (3 * 1e-6 + 3.0))


def test_tree_by_hand():
    group = wired("dp=8")["dp"]
    assert tree_seconds("all_gather", 0, group) == pytest.approx(3e-6)
    assert tree_seconds("all_reduce", 0, group) == pytest.approx(6e-6)


def test_a_ring_over_nodes_pays_the_far_latency_once_for_each_node():
    group = wired("dp=32")["dp"]  # four nodes
    assert ring_seconds("all_gather", 0, group) == pytest.approx(4 * 1e-5 + 27 * 1e-6)


def test_trees_win_small_messages_and_rings_large_ones():
    group = wired("dp=64", DEVICES["h100"])["dp"]
    small, large = 64 * 1024, 4096 * MIB
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert tree_seconds(kind, small, group) < ring_seconds(kind, small, group)
        assert ring_seconds(kind, large, group) < tree_seconds(kind, large, group)
        for size in (small, large):
            better = min(tree_seconds(kind, size, group), ring_seconds(kind, size, group))
            assert collective_seconds(kind, size, group) == better


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_and_more_ranks_never_take_less(kind):
    device = DEVICES["h100"]
    sizes = [0, 1, 1024, MIB, 64 * MIB, 1024 * MIB]
    for ranks in (2, 4, 8, 16, 64, 512):
        group = wired(f"dp={ranks}", device)["dp"]
        times = [collective_seconds(kind, size, group) for size in sizes]
        assert times == sorted(times) and times[0] > 0
    for size in sizes:
        times = [
            collective_seconds(kind, size, wired(f"dp={ranks}", device)["dp"])
            for ranks in (2, 4, 8, 16, 64, 512)
        ]
        assert times == sorted(times)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_communicates_nothing(kind):
    assert collective_seconds(kind, 1e9, wired("dp=1")["dp"]) == 0


def test_crossing_nodes_costs_more():
    inside, across = (wired(mesh, DEVICES["h100"])["dp"] for mesh in ("dp=8", "dp=8,tp=8"))
    for kind in KINDS:
        slow, fast = (collective_seconds(kind, 64 * MIB, group) for group in (across, inside))
        assert slow > 3 * fast


def test_all_to_all_sends_what_leaves_the_node_through_the_rank_s_own_share():
    group = wired("dp=16")["dp"]
    assert collective_seconds("all_to_all", 16e6, group) == pytest.approx(8e6 / 1e7 + 4e-5)


def test_a_kind_may_have_its_own_link():
    device = round_device(collectives={"all_reduce": Link(0.0, 1e6)})
    group = links(MeshShape((("dp", 2),)), device)["dp"]
    assert collective_seconds("all_reduce", 1e6, group) == pytest.approx(1.0)
    assert collective_seconds("all_gather", 1e6, group) == pytest.approx(5e-3, rel=0.2)


def test_a_node_tells_kind_bytes_and_mesh_dimension():
    write = Written({"x": (6, 4)}, mesh="dp=3,tp=2")
    whole = write.gather(write["x"], 3)
    part = write(torch_internals.REDUCE_SCATTER, whole, "sum", 2, "tp")
    total = write(torch_internals.ALL_REDUCE, write["x"], "sum", "tp")
    found = [collective_of(node) for node in (whole.args[0], part, total)]
    assert found == [
        ("all_gather", 18 * 4 * 4, "dp"),
        ("reduce_scatter", 18 * 4 * 4, "tp"),
        ("all_reduce", 6 * 4 * 4, "tp"),
    ]
    with pytest.raises(ValueError, match="no collective"):
        collective_of(write(torch.ops.aten.neg.default, write["x"]))


def test_a_group_is_plain_data():
    group = Group(2, 2, 1e-6, 1e9, 1e-5, 1e8)
    assert group.of_kind("all_reduce") is group and not group.crosses
