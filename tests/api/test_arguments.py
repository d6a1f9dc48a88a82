"""What a model is given as: one device, or an error that names the tensors."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import Engine, torch_internals
from stepgraph.api.arguments import device_of
from stepgraph.errors import UsageError
from tests.support import adamw, mlp, regression_batch


def test_a_module_on_two_devices_names_a_tensor_on_each():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch_internals.new_fake_mode():
        model[1].running_mean = torch.empty(2, device="cuda:1")
    with pytest.raises(UsageError, match=r"0\.weight on cpu, 1\.running_mean on cuda:1"):
        device_of(model)


def test_a_module_on_the_meta_device_goes_where_this_process_can_compute():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    found = device_of(model)
    assert torch_internals.is_there(found.type)


def test_an_accelerator_that_torch_was_only_built_for_is_not_used(monkeypatch):
    """A CUDA build of torch on a machine without a driver."""
    built_for = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else built_for,
    )
    assert device_of(nn.Linear(2, 2, device="meta")).type == "cpu"
    assert not torch_internals.is_there("cuda")


@pytest.mark.parametrize("what", ["plan", "Engine", "parallelize"])
def test_a_model_that_is_placed_already_is_an_error_that_says_so(what):
    model, batch = mlp(), regression_batch()
    engine = Engine(model, optimizer=adamw(model), plan="ddp", lowering="eager")
    engine.step(batch)
    again = {
        "plan": lambda: stepgraph.plan(model, example=batch, mesh="dp=2", device="cpu"),
        "Engine": lambda: Engine(model, optimizer=adamw(model), plan="ddp"),
        "parallelize": lambda: stepgraph.parallelize(model, mesh="dp=1", example=batch),
    }
    with pytest.raises(UsageError, match="is a DTensor already: an Engine"):
        again[what]()
