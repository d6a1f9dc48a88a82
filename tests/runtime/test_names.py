"""A model whose parts are moved between steps: compiled anew, or an error that names what moved."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import UsageError


class TwoStages(nn.Module):
    """Layers before and behind a tanh."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Softmax(-1)])
        self.behind = nn.ModuleList()

    def forward(self, x):
        for layer in self.before:
            x = layer(x)
        x = torch.tanh(x)
        for layer in self.behind:
            x = layer(x)
        return x


def made():
    model = TwoStages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = lambda m, b: m(b["x"]).square().mean()  # noqa: E731
    return model, stepgraph.Engine(model, loss=loss, optimizer=optimizer, lowering="eager")


def test_a_part_that_moves_to_an_empty_stage_is_compiled_anew():
    x = torch.randn(3, 4)
    plain, (model, engine) = TwoStages(), made()
    for _ in range(2):
        assert engine.step({"x": x}).item() == pytest.approx(plain(x).square().mean().item())
        for one in (plain, model):
            if not one.behind:
                one.behind.append(one.before.pop(-1))
    assert engine.stats.recompiles == ["step: modules were moved, added or removed"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            lambda m: m.behind.append(m.before.pop(1)),
            "moved .*: before.1.weight to behind.0.weight",
        ),
        (
            lambda m: m.before.insert(0, m.before.pop(1)),
            "moved .*: before.1.weight to before.0.weight",
        ),
        (lambda m: m.before.pop(1), "removed .*: before.1.weight"),
        (lambda m: m.before.append(nn.Linear(4, 4)), "added .*: before.3.weight"),
        (
            lambda m: m.behind.append(nn.BatchNorm1d(4, affine=False)),
            "added.*: behind.0.running_mean",
        ),
        (
            lambda m: m.before.insert(2, nn.BatchNorm1d(4, affine=False)),
            "added.*: before.2.running_mean",
        ),
    ],
)
def test_what_programs_take_by_name_stays_where_it_is(change, names):
    model, engine = made()
    engine.step({"x": torch.randn(3, 4)})
    change(model)
    with pytest.raises(UsageError, match=names):
        engine.step({"x": torch.randn(3, 4)})
