"""The numbers that a scale is made of."""

import torch
from torch import fx

from stepgraph.analysis.rows import literals
from stepgraph.program.program import Program
from tests.support import captured

aten = torch.ops.aten


class Deep(torch.nn.Module):
    """Each sum has the one before twice: the paths through them double with every layer."""

    def __init__(self, layers: int = 64):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.sum() / 3.0


def scales(program: Program) -> list[fx.Node]:
    return [n for n in program.operations() if n.target in (aten.div.Tensor, aten.div.Scalar)]


def test_a_deep_model_is_followed_once():
    program = captured(Deep(), torch.ones(1, 1))
    assert any(3.0 in literals(program, node) for node in scales(program))
