"""Code that asks for its device gives what it gives there, or is an error that names the line."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.device_code import asks_for_device
from stepgraph.errors import GraphBreakError
from stepgraph.program.metadata import meta


def branches_on_type(x):
    if x.device.type == "cuda":
        x = x * 2
    return x


def branches_on_cuda(x):
    return x.relu() if x.is_cuda else x.tanh()


def ends_early(x):
    if x.device.type != "cpu":
        return x
    return x.cos()


def moves(x):
    return x.cuda() * 2


def makes_there(x):
    return x + torch.zeros(4, device="cuda")


def branches_without_difference(x):
    return x * 2 if x.is_cuda else x * 2


def casts_there(x):
    with torch.autocast("cuda", torch.bfloat16):
        return x @ x.T


def asks_nothing(x):
    return torch.cat([x, torch.zeros(4, 4, device=x.device)])


SAME = [branches_without_difference, casts_there, asks_nothing, moves]


def model_of(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return function(self.first(x)).float().square().mean()

    return Model()


def planned(function, device):
    model = model_of(function)
    given = {"mesh": "dp=2", "placement": "ddp", "memory": "none", "compute_dtype": None}
    return stepgraph.plan(model, example=torch.randn(4, 4), device=device, **given)


def calls(plan, function):
    """Operators of the forward."""
    program = plan.programs(model_of(function), example=torch.randn(4, 4))["step"]
    return {
        str(n.target).split(".")[1] for n in program.operations() if meta(n)["phase"] == "forward"
    }


@pytest.mark.parametrize(
    "function, there, line",
    [
        (branches_on_type, "mul", "in branches_on_type: x = x * 2"),
        (branches_on_cuda, "relu", "in branches_on_cuda: return x.relu() if"),
        (ends_early, "square", "in forward: return function(self.first(x)).float()"),
    ],
)
def test_code_is_told_of_the_device_and_the_plan_names_the_line_that_differs(function, there, line):
    plan = planned(function, "h100")
    assert there in calls(plan, function) or there == "square"
    assert not {"tanh", "cos"} & calls(plan, function)
    (note,) = [note for note in plan.notes if "something else on cuda" in note]
    assert "test_device_code.py" in note
    assert line in note


@pytest.mark.parametrize("function", SAME, ids=lambda f: f.__name__)
def test_what_computes_the_same_is_planned_without_a_word(function):
    plan = planned(function, "h100")
    assert not [note for note in plan.notes if "something else" in note]
    assert calls(plan, function)


def test_a_model_for_the_device_alone_is_planned_and_said_to_be():
    plan = planned(makes_there, "h100")
    assert {"full", "add"} <= calls(plan, makes_there)
    assert any("for cuda alone, on the host it cannot be captured" in note for note in plan.notes)


@pytest.mark.parametrize("function, here", [(branches_on_cuda, "tanh"), (ends_early, "cos")])
def test_on_the_host_code_is_told_of_the_host(function, here):
    plan = planned(function, "cpu")
    assert here in calls(plan, function)
    assert not plan.notes


def test_a_device_that_nothing_is_on_is_an_error_that_names_the_line():
    with pytest.raises(GraphBreakError) as error:
        planned(makes_there, "cpu")
    assert "makes_there: return x + torch.zeros" in error.value.where


def test_code_that_names_no_device_is_not_traced_again():
    assert not asks_for_device([asks_nothing.__code__], "cuda")
    assert not asks_for_device([branches_on_cuda.__code__], "cpu")
    assert not asks_for_device([torch.nn.functional.pad.__code__, nn.LSTM.forward.__code__], "cuda")
    for function in (branches_on_cuda, branches_on_type, casts_there):
        assert asks_for_device([function.__code__], "cuda")
