"""The numbers that a scale is made of."""

import pytest
import torch
from torch import fx

from stepgraph.analysis.rows import literals, surely_rows
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


class Several(torch.nn.Module):
    """Rows of the batch, a sum over them, and a histogram of as many numbers as it was asked for."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.EmbeddingBag(12, 6)

    def forward(self, x):
        rows = self.table((x.abs() * 5).long().clamp(max=11))
        return rows.sum() + rows.mean(0).sum() + torch.histc(x.detach(), 10).sum()


@pytest.mark.parametrize("rows, expected", [(10, True), (14, True), (12, False), (6, False)])
def test_rows_are_told_where_nothing_else_is_as_long(rows, expected):
    program = captured(Several(), torch.randn(rows, 8))
    (bag,) = (n for n in program.operations() if n.target is aten._embedding_bag.default)
    result = next(n for n in bag.users if n.args[1] == 0)
    assert surely_rows(program, result) is expected
    others = [aten.histc.default, aten.mean.dim]
    found = [n for n in program.operations() if n.target in others]
    assert len(found) == 2 and not any(surely_rows(program, node) for node in found)
