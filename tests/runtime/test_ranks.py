"""Mesh strings and the ranks that are there."""

import pytest
import torch

from stepgraph.errors import MeshError
from stepgraph.runtime.ranks import join_ranks, parse_mesh


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
