"""Any placement over two mesh dimensions can become any other, also where both cut one dimension."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.equivalence.lockstep import run_lockstep
from stepgraph.placement.apply import place_values
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.program import roles
from stepgraph.program.invariants import check_invariants
from stepgraph.program.layout import show
from stepgraph.program.shards import join, split
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.test_rules import one_operation

KEPT = (Replicate(), Shard(0), Shard(1))
FROM = list(itertools.product((*KEPT, Partial()), repeat=2))
INTO = list(itertools.product(KEPT, repeat=2))


@pytest.mark.parametrize("have", FROM, ids=show)
def test_every_redistribution_keeps_the_value(have):
    mesh = parse_mesh("a=2,b=2")
    value = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for want in INTO:
        program, node, _ = one_operation(torch.ops.aten.clone.default, (value,), {})
        decision = PlacementDecision("test")
        decision.inputs = {roles.label(program.inputs[0]): have}
        decision.operations[node.meta["name"]] = OperationPlacement((want,), (want,))
        decision.outputs = {roles.label(program.outputs[0]): want}
        placed = place_values(program, decision, mesh)
        check_invariants(placed)
        results = run_lockstep(placed, [[part] for part in split(value, have, mesh)])
        whole = join([result[0] for result in results], value.shape, want, mesh)
        torch.testing.assert_close(
            whole, value, msg=lambda m, w=want: f"{show(have)} -> {show(w)}: {m}"
        )
