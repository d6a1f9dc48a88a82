import pytest

from stepgraph.cli.plan import meshes_to_try, placement_on, sensible_meshes
from stepgraph.cost.devices import find_device
from stepgraph.errors import MeshError, UsageError
from stepgraph.runtime.ranks import parse_mesh

H100 = find_device("h100")


def test_sensible_meshes_keep_tensor_parallelism_inside_a_node():
    assert list(map(str, sensible_meshes(16, 8))) == [
        "dp=16", "dp=8,tp=2", "dp=4,tp=4", "dp=2,tp=8",
        "replicate=2,shard=8", "replicate=2,shard=4,tp=2", "replicate=2,shard=2,tp=4",
    ]  # fmt: skip
    assert list(map(str, sensible_meshes(4, 8))) == ["dp=4", "dp=2,tp=2", "dp=1,tp=4"]
    assert list(map(str, sensible_meshes(1, 8))) == ["dp=1"]
    for ranks in (1, 2, 6, 8, 128, 512, 16384):
        meshes = sensible_meshes(ranks, 8)
        assert {mesh.world_size for mesh in meshes} == {ranks} and len(meshes) <= 7


@pytest.mark.parametrize(
    ("mesh", "placement", "expected"),
    [
        ("dp=4", "zero3", "zero3"),
        ("replicate=2,shard=2", "zero3", "hsdp"),
        ("replicate=2,shard=2,tp=2", "tp+zero3", "tp+hsdp"),
        ("replicate=2,shard=2", "ddp", None),
        ("dp=4", "tp", None),
        ("replicate=2,shard=2", "auto", "auto"),
    ],
)
def test_what_a_placement_is_on_a_mesh(mesh, placement, expected):
    assert placement_on(parse_mesh(mesh), placement) == expected


def test_meshes_of_one_size_are_compared():
    meshes, chosen = meshes_to_try(["dp=4", "dp=2,tp=2", "dp=4"], None, H100)
    assert (list(map(str, meshes)), chosen) == (["dp=4", "dp=2,tp=2"], False)
    assert meshes_to_try(["auto"], 128, H100) == (sensible_meshes(128, 8), True)


@pytest.mark.parametrize(
    ("asked", "ranks", "message"),
    [
        (["dp=4", "dp=8"], None, "dp=4 has 4, dp=8 has 8"),
        (["dp=4"], 8, "--ranks is 8"),
        (["tpp=4"], None, "did you mean 'tp'"),
        (["auto"], None, "add --ranks"),
        (["auto", "dp=2"], 2, "stands alone"),
        (["dp"], None, "not understood"),
    ],
)
def test_meshes_that_cannot_be(asked, ranks, message):
    with pytest.raises(UsageError, match=message):
        meshes_to_try(asked, ranks, H100)


def test_a_mesh_error_is_bad_usage():
    assert issubclass(MeshError, UsageError)
