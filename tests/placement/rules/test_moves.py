"""What a change of placement is said to cost is what its emitted operations cost."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Shard

from stepgraph.cost.simulate import simulate
from stepgraph.placement.rules.redistribution import Moves, _Part, _result
from stepgraph.program.layout import show
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.planned import TOYS
from tests.placement.rules.test_redistribution import FROM, INTO, one_move

PAIRS = list(itertools.product(FROM, INTO))[::23]


@pytest.mark.parametrize("have", sorted({p for p, _ in PAIRS}, key=show), ids=show)
def test_seconds_are_those_of_the_emitted_operations(have):
    for want in (want for made, want in PAIRS if made == have):
        check("dp=2,tp=2", torch.randn(16, 16), have, want)


@pytest.mark.parametrize("shape", [(4, 4), (4, 8, 4), (8, 4, 4), (4, 4, 4)])
def test_dimensions_as_long_as_there_are_ranks(shape):
    """Parts of one row: what is exchanged is viewed with a dimension of size 1."""
    for source, target in itertools.permutations(range(len(shape)), 2):
        check("dp=4", torch.randn(shape), (Shard(source),), (Shard(target),))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("dim", range(3))
def test_a_view_of_a_strided_value_has_torchs_strides(dim, order):
    value = torch.randn(4, 8, 4).permute(order)
    shape = tuple(value.shape)
    for first in (4, 2):
        parts = [*shape[:dim], first, shape[dim] // first, *shape[dim + 1 :]]
        part = _Part(shape, value.stride(), value.itemsize)
        found, real = _result(torch.ops.aten.view.default, part, (parts,)), value.view(parts)
        rows = zip(real.shape, found.strides, real.stride(), strict=True)
        assert found.shape == real.shape
        assert all(mine == torchs for size, mine, torchs in rows if size > 1)


def check(mesh, value, have, want):
    """Holds what a move is said to take against what its operations take."""
    mesh, device = parse_mesh(mesh), TOYS["balanced"]
    said = Moves(mesh, device).cost(tuple(value.shape), torch.float32, have, want).seconds
    if math.isinf(said):
        return
    placed, name = one_move(value, have, want, mesh)
    (own,) = (n for n in placed.operations() if n.meta["name"] == name)
    line = simulate(placed, device)
    rest = sum(event.seconds for event in line.events if event.node is not own)
    assert rest == pytest.approx(said, abs=1e-15), show(want)
