"""A Triton kernel behind an operator, registered: placed as its sharding says, with a stand-in on hosts.

Needs Triton, which comes with torch's CUDA builds; the kernel itself runs where a device is.
"""

import pytest
import torch
from torch import Tensor, nn

import stepgraph
from tests.one_process import OneProcessRun
from tests.support import adamw

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

X = torch.linspace(-2, 2, 4 * 8).view(4, 8)


@triton.jit
def swish_kernel(source, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < size)
    tl.store(result + at, x * tl.sigmoid(x), mask=at < size)


@torch.library.triton_op("tested_triton::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    torch.library.wrap_triton(swish_kernel)[grid](x, result, x.numel(), 256)
    return result


def slope(x):
    return x.sigmoid() * (1 + x * (1 - x.sigmoid()))


swish.register_autograd(
    lambda ctx, gradient: gradient * slope(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
stepgraph.register_operator(
    swish,
    sharding="rows width -> rows width",
    cost=lambda x: (5 * x.numel(), 2 * x.nbytes),
    host=nn.functional.silu,
)
SWISH = torch.ops.tested_triton.swish.default


class Gated(nn.Module):
    """A perceptron with the kernel, or with torch's own."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(8, 16), nn.Linear(16, 4), function

    def forward(self, x):
        return self.down(self.function(self.up(x))).square().mean()


def calls(program):
    return [node for node in program.operations() if node.target is SWISH]


@pytest.mark.parametrize(
    ("mesh", "preset", "shape"),
    [("dp=2", "zero3", (2, 16)), ("tp=2", "tp", (4, 8)), ("dp=2,tp=2", "tp+zero3", (2, 8))],
)
def test_it_is_placed_as_its_sharding_says_and_trains_as_torchs_own(mesh, preset, shape):
    plan = stepgraph.plan(
        Gated(swish), example=X, mesh=mesh, placement=preset, memory="none", compute_dtype=None
    )
    (node,) = calls(plan.programs(Gated(swish), example=X)["step"])
    assert node.meta["val"].shape == shape
    assert node.meta["val"].device.type == "cuda"
    found, expected = [], []
    for function, losses in ((swish, found), (nn.functional.silu, expected)):
        model = Gated(function)
        run = OneProcessRun(model, optimizer=adamw(model), mesh=mesh, plan=preset)
        losses += [run.step(X).item() for _ in range(3)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
