"""compare_with_classes: a number scattered to one class of each row is chosen by a comparison."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.placement.passes.compare_with_classes import compare_with_classes
from tests.support import assert_bitwise, assert_golden, captured, values

aten = torch.ops.aten


class Classifier(nn.Module):
    """A cross entropy over ``shape``, classes in dimension 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, labels):
        return F.cross_entropy(x * self.weight, labels, ignore_index=2)


class Scattered(nn.Module):
    """A number put where ``index`` says along ``dim``."""

    def __init__(self, dim, index, table=torch.zeros_like):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("index", torch.tensor(index))
        self.dim, self.table = dim, table

    def forward(self, x):
        return (self.table(x).scatter(self.dim, self.index, -2.0) * x * self.weight).sum()


def scatters(program):
    return [node for node in program.operations() if node.target is aten.scatter.value]


def before_and_after(model, batch):
    program = drop_identities(captured(model, batch))
    return program, compare_with_classes(program.copy())


@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3)])
def test_a_cross_entropy_scatters_nothing(shape):
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (shape[0], *shape[2:]), generator=random)
    model, batch = Classifier(), (torch.randn(*shape, generator=random), labels)
    program, after = before_and_after(model, batch)
    assert scatters(program) and not scatters(after)
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(after))


@pytest.mark.parametrize(
    ("dim", "index", "one_a_row"),
    [
        (1, [[4], [0], [2]], True),
        (-1, [[4], [0], [2]], True),
        (0, [[2, 1, 0, 1, 2]], True),
        (1, [[4, 1], [0, 3], [2, 2]], False),
        (1, [[4], [0]], False),
    ],
)
@pytest.mark.parametrize("table", [torch.zeros_like, torch.sin])
def test_one_number_a_row(dim, index, one_a_row, table):
    model, batch = Scattered(dim, index, table), torch.rand(3, 5)
    program, after = before_and_after(model, batch)
    assert bool(scatters(after)) != one_a_row
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(after))


def test_golden():
    program, after = before_and_after(Scattered(1, [[0], [2]]), torch.rand(2, 3))
    assert_golden(__file__, "compare_with_classes", program, after)
