"""What a change of placement is said to cost is what its emitted operations cost."""

import itertools
import math

import pytest
import torch

from stepgraph.cost.simulate import simulate
from stepgraph.placement.apply import place_values
from stepgraph.placement.redistribution import Moves
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import show
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.planned import TOYS
from tests.placement.test_redistribution import FROM, INTO
from tests.placement.test_rules import one_operation

PAIRS = list(itertools.product(FROM, INTO))[::23]


@pytest.mark.parametrize("have", sorted({p for p, _ in PAIRS}, key=show), ids=show)
def test_seconds_are_those_of_the_emitted_operations(have):
    mesh, device = parse_mesh("a=2,b=2"), TOYS["balanced"]
    moves, value = Moves(mesh, device), torch.randn(16, 16)
    for want in (want for made, want in PAIRS if made == have):
        said = moves.cost((16, 16), torch.float32, have, want).seconds
        if math.isinf(said):
            continue
        program, node, _ = one_operation(torch.ops.aten.clone.default, (value,), {})
        decision = PlacementDecision("test")
        decision.inputs = {roles.label(program.inputs[0]): have}
        decision.operations[node.meta["name"]] = OperationPlacement((want,), (want,))
        decision.outputs = {roles.label(program.outputs[0]): want}
        placed = place_values(program, decision, mesh)
        (own,) = (n for n in placed.operations() if n.meta["name"] == node.meta["name"])
        line = simulate(placed, device)
        rest = sum(event.seconds for event in line.events if event.node is not own)
        assert rest == pytest.approx(said, abs=1e-15), show(want)
