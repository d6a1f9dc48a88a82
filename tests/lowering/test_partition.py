"""forward_and_backward: two Programs that together are the one."""

import pytest
import torch
from torch import nn

from stepgraph.lowering.partition import forward_and_backward
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.program import roles
from stepgraph.program.program import BACKWARD, FORWARD
from tests.support import captured, values


class Net(nn.Module):
    """A buffer that is written, one that is read, and a tensor that both sides read."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x):
        return (self.b(self.norm(self.a(x)).tanh()) * self.scale).square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def sides(program):
    return forward_and_backward(write_state_in_place(program.copy()))


def test_each_side_has_its_own_operations_and_what_passes_is_saved(model):
    program = captured(model, torch.randn(3, 4))
    forward, backward = sides(program)
    assert {node.meta["phase"] for node in forward.operations()} == {FORWARD}
    assert BACKWARD in {node.meta["phase"] for node in backward.operations()}
    left = [role for role in forward.outputs if isinstance(role, roles.Saved)]
    taken = [role for role in backward.inputs if isinstance(role, roles.Saved)]
    assert left == taken and left
    assert roles.Loss() in forward.outputs and roles.Tangent() in backward.inputs
    assert {r for r in backward.outputs} == {
        r for r in program.outputs if isinstance(r, roles.Grad)
    }
    assert not any(isinstance(role, roles.UserInput) for role in backward.inputs)


def test_one_after_the_other_they_give_the_results_of_the_whole(model):
    x = torch.randn(3, 4)
    program = captured(model, x)
    expected = values(model, x).execute(program)
    given = zip(program.inputs, program.input_values, strict=True)
    held = {role: values(model, x).of(role, value).clone() for role, value in given}
    forward, backward = sides(program)

    def run(side, given):
        side.module.recompile()
        with torch.no_grad():
            results = side.module(*(given[role] for role in side.inputs))
        return dict(zip(side.outputs, results, strict=True))

    first = run(forward, held)
    second = run(backward, held | first)
    found = first | second
    for role, value in expected.items():
        if isinstance(role, (roles.Loss, roles.Grad)):
            assert torch.equal(found[role], value), role
        else:
            assert torch.equal(held[roles.written_input(role)], value), role
