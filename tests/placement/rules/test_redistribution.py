"""Any placement over two mesh dimensions can become any other, also where both cut one dimension."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.equivalence.lockstep import run_lockstep
from stepgraph.placement.passes.place_values import place_values
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.planning.placements import parse_placements
from stepgraph.program import roles
from stepgraph.program.invariants import check_invariants
from stepgraph.program.layout import InnerShard, show
from stepgraph.program.shards import join, split
from stepgraph.runtime.ranks import parse_mesh
from tests.operators.test_sharding import one_operation
from tests.sampling import sampled

KEPT = (Replicate(), Shard(0), Shard(1), InnerShard(0, 4), InnerShard(0, 2), InnerShard(1, 4))
FROM = list(itertools.product((*KEPT, Partial()), repeat=2))
INTO = list(itertools.product(KEPT, repeat=2))


def test_an_inner_shard_is_a_slice_of_every_block():
    mesh = parse_mesh("dp=2")
    value = torch.arange(12)
    parts = split(value, (InnerShard(0, 3),), mesh)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert torch.equal(join(parts, value.shape, (InnerShard(0, 3),), mesh), value)


def test_inner_shards_survive_text_and_copies():
    placements = (InnerShard(0, 6), Shard(0))
    assert show(placements) == "S(0/6)S(0)"
    assert parse_placements(show(placements)) == placements
    assert copy.deepcopy(placements) == placements
    assert pickle.loads(pickle.dumps(placements)) == placements
    assert InnerShard(0, 6) != Shard(0) and Shard(0) != InnerShard(0, 6)


def one_move(value, have, want, mesh):
    """A placed program that changes a value's placements for one copy, and the copy's stable name."""
    program, node, _ = one_operation(torch.ops.aten.clone.default, (value,), {})
    decision = PlacementDecision(
        "test",
        inputs={roles.label(program.inputs[0]): have},
        operations={node.meta["name"]: OperationPlacement((want,), (want,))},
        outputs={roles.label(program.outputs[0]): want},
    )
    return place_values(program, decision, mesh), node.meta["name"]


@pytest.mark.parametrize("have", sampled((have,) for have in FROM), ids=show)
def test_every_redistribution_keeps_the_value(have):
    mesh = parse_mesh("dp=2,tp=2")
    value = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    for want in INTO:
        placed, _ = one_move(value, have, want, mesh)
        check_invariants(placed)
        results = run_lockstep(placed, [[part] for part in split(value, have, mesh)])
        whole = join([result[0] for result in results], value.shape, want, mesh)
        torch.testing.assert_close(
            whole, value, msg=lambda m, w=want: f"{show(have)} -> {show(w)}: {m}"
        )
