"""move_to_target: a Program of the host is one of the device, with what kernels give there."""

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.lowering.passes.move_to_target import move_to_target
from stepgraph.planning.target import Target, usual_target
from stepgraph.program.program import tensors_of
from tests.propagation import differences
from tests.support import assert_golden, captured

CUDA = Target("cuda", 2, True, 2**20)


class Small(nn.Module):
    """A norm, numbers made on the way, a constant."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        steps = torch.arange(4, device=x.device) * torch.tensor([1, 2, 3, 4])
        return F.relu(self.norm(x) * steps).sum()


def before_and_after(target):
    program = captured(Small(), torch.randn(2, 4), compute_dtype=torch.bfloat16)
    return program, move_to_target(program.copy(), target)


def test_everything_is_there():
    _, after = before_and_after(CUDA)
    assert not differences(after, "cuda")
    norm = next(n for n in after.operations() if "native_layer_norm.default" in str(n.target))
    assert [t.dtype for t in tensors_of(norm.meta["val"])][1] is torch.float32


def test_the_program_that_it_was_made_of_stays():
    program, _ = before_and_after(CUDA)
    assert not differences(program, "cpu")


def test_on_the_host_nothing_changes():
    program, after = before_and_after(usual_target("cpu"))
    assert str(program) == str(after)


def test_golden():
    assert_golden(__file__, "move_to_target", *before_and_after(CUDA))
