"""Autocast captured on the host: the types that torch gives on CUDA, operator by operator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph import torch_internals
from stepgraph.torch_internals.other_device import casts_of
from tests.support import captured

CALLS = {
    "linear": lambda x, w: F.linear(x, w),
    "softmax": lambda x, w: F.softmax(F.linear(x, w), -1),
    "log_softmax": lambda x, w: F.log_softmax(F.linear(x, w), -1),
    "layer_norm": lambda x, w: F.layer_norm(F.linear(x, w), (4,)),
    "exp": lambda x, w: F.linear(x, w).exp(),
    "pow": lambda x, w: F.linear(x, w) ** 2,
    "sum": lambda x, w: F.linear(x, w).sum(-1),
    "sum in a type": lambda x, w: F.linear(x, w).sum(-1, dtype=torch.bfloat16),
    "cumsum": lambda x, w: F.linear(x, w).cumsum(0),
    "rsqrt": lambda x, w: F.linear(x, w).rsqrt(),
    "sigmoid": lambda x, w: F.linear(x, w).sigmoid(),
    "gelu": lambda x, w: F.gelu(F.linear(x, w)),
    "mse_loss": lambda x, w: F.mse_loss(F.linear(x, w), x),
    "cross_entropy": lambda x, w: F.cross_entropy(F.linear(x, w), x.argmax(-1)),
    "addcmul": lambda x, w: torch.addcmul(x, F.linear(x, w), F.linear(x, w)),
    "cat": lambda x, w: torch.cat([x, F.linear(x, w)]),
    "add": lambda x, w: x + F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "group_norm": lambda x, w: F.group_norm(F.linear(x, w), 2),
    "fft": lambda x, w: torch.fft.fft(x),
    "in double precision": lambda x, w: x.double().exp(),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3),
}  # fmt: skip


def type_on(device, call):
    """On fake tensors, under autocast as its dispatcher does it: no device is needed."""
    was = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        with torch_internals.new_fake_mode(), torch.no_grad():
            x, w = (torch.empty(4, 4, device=device) for _ in range(2))
            return call(x, w).dtype
    finally:
        torch.set_autocast_enabled(device, was[0])
        torch.set_autocast_dtype(device, was[1])
        torch.clear_autocast_cache()


@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_cuda(name):
    expected = type_on("cuda", CALLS[name])
    with casts_of("cuda"):
        assert type_on("cpu", CALLS[name]) == expected


def test_the_host_is_as_before_afterwards():
    before = {name: type_on("cpu", call) for name, call in CALLS.items()}
    with casts_of("cuda"):
        pass
    assert {name: type_on("cpu", call) for name, call in CALLS.items()} == before
    assert before["softmax"] == torch.bfloat16  # else nothing here could fail


class Island(nn.Module):
    """A part of it computes in another type, on a device that it is told or looks up."""

    def __init__(self, device_type):
        super().__init__()
        self.device_type = device_type
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast(self.device_type or x.device.type, torch.bfloat16):
            y = F.softmax(self.inner(x), -1)
        return y.float().sum()


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("device_type", [None, "cuda"])
def test_an_island_is_captured_as_it_runs_on_the_target(device_type):
    program = captured(Island(device_type), torch.randn(2, 4), device_type="cuda")
    types = {
        str(n.target): n.meta["val"].dtype
        for n in program.operations("forward")
        if "softmax" in str(n.target) or ".addmm" in str(n.target)
    }
    assert types == {
        "aten.addmm.default": torch.bfloat16,
        "aten._softmax.default": torch.float32,
    }


def test_on_the_host_an_island_is_the_hosts():
    program = captured(Island(None), torch.randn(2, 4))
    softmax = next(n for n in program.operations() if "_softmax.default" in str(n.target))
    assert softmax.meta["val"].dtype == torch.bfloat16
