"""Mesh strings and the ranks that are there."""

import logging
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stepgraph import torch_internals
from stepgraph.cli.launcher import launch
from stepgraph.errors import BatchError, MeshError
from stepgraph.runtime import ranks as ranks_module
from stepgraph.runtime.ranks import agree_on_shapes, join_ranks, parse_mesh


def test_a_mesh_is_names_and_sizes():
    mesh = parse_mesh("dp=4, tp=2")
    assert mesh.dims == (("dp", 4), ("tp", 2))
    assert mesh.world_size == 8
    assert str(mesh) == "dp=4,tp=2"


@pytest.mark.parametrize(
    "text",
    ["", "dp", "dp=", "dp=0", "dp=-1", "dp=two", "=4", "dp=2,", "d p=2", "dp:2", "dp=2;tp=2"],
)
def test_a_mesh_that_is_not_understood_says_where(text):
    with pytest.raises(MeshError, match="is not understood at"):
        parse_mesh(text)


def test_a_dimension_named_twice_is_an_error():
    with pytest.raises(MeshError, match="twice"):
        parse_mesh("dp=2,dp=2")


def test_a_dimension_without_a_role_is_an_error():
    with pytest.raises(MeshError, match=r"(?s)role of a mesh dimension 'cp'.*known: dp, replicate"):
        parse_mesh("dp=2,cp=2")
    named = torch_internals.one_process_mesh("cpu", (("cp", 1),))
    with pytest.raises(MeshError, match="role of a mesh dimension 'cp'"):
        join_ranks(named, torch.device("cpu"))


def test_a_device_mesh_without_names_is_for_data_if_it_has_one_dimension():
    one = SimpleNamespace(mesh_dim_names=None, shape=(4,), ndim=1, size=lambda: 4)
    assert str(ranks_module._shape_of(one)) == "dp=4"
    two = SimpleNamespace(mesh_dim_names=None, shape=(2, 2), ndim=2)
    with pytest.raises(MeshError, match="does not name its dimensions"):
        ranks_module._shape_of(two)


def test_one_process_is_one_rank():
    ranks = join_ranks(None, torch.device("cpu"))
    assert (ranks.rank, ranks.shape.dims, ranks.groups, ranks.owns_group) == (
        0,
        (("dp", 1),),
        {},
        False,
    )


def test_a_mesh_of_more_ranks_than_run_says_how_to_launch_them():
    with pytest.raises(MeshError, match="nproc-per-node 4"):
        join_ranks("dp=4", torch.device("cpu"))


def _agree():
    """One rank: the same shapes; other shapes; a shape that rank 1 meets alone while rank 0 reduces."""
    rank, said = int(os.environ["RANK"]), []
    ranks = join_ranks(None, torch.device("cpu"))
    agree_on_shapes(("constant", _agree), "x [2]", ranks)
    try:
        agree_on_shapes(rank, f"x [{rank}]", ranks)
    except BatchError as error:
        said.append(str(error))
    if rank == 1:
        own_store = torch_internals.rendezvous_store

        def impatient():
            store = own_store()
            store.set_timeout(timedelta(seconds=0.5))
            return store

        warned = []
        logging.getLogger("stepgraph").addFilter(lambda record: warned.append(record.getMessage()))
        ranks_module.PATIENCE, torch_internals.rendezvous_store = 0.5, impatient
        try:
            agree_on_shapes("alone", "x [7]", ranks)
        except BatchError as error:
            said += [*warned, str(error)]
    total = torch.ones(1)
    dist.all_reduce(total)  # what rank 0 was in meanwhile
    return [*said, total.item()]


def test_shapes_are_agreed_on_and_a_rank_that_comes_alone_says_so():
    zero, one = launch(_agree, ranks=2)
    assert "rank 0: x [0]; rank 1: x [1]" in zero[0] and zero[0] == one[0]
    assert "rank 1 has a batch of a new shape (x [7]) and waits for ranks [0]" in one[1]
    assert "x [7]" in one[2] and "ranks [0] have none" in one[2]
    assert zero[-1] == one[-1] == 2.0
