"""engine(batch), engine.backward, engine.optimizer_step: the run that engine.step makes."""

import copy
import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import UsageError
from stepgraph.runtime.ranks import parse_mesh


class Net(nn.Module):
    """Dropout, batch norm, an odd width: uneven shards."""

    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(6, 9), nn.Dropout(0.2)
        self.norm, self.b = nn.BatchNorm1d(9), nn.Linear(9, 3)

    def forward(self, x):
        return self.b(self.norm(self.drop(self.a(x).relu())))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def engine_of(plan="ddp", mesh=None, lowering="eager", **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return stepgraph.Engine(
        model, loss=loss, optimizer=optimizer, mesh=mesh, plan=plan, lowering=lowering,
        max_grad_norm=0.5, **options,
    )  # fmt: skip


def batch_of(step, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def train(plan, mesh, lowering, split):
    """One rank: losses and whole parameters."""
    shape = parse_mesh(mesh)
    rank = shape.data_rank(int(os.environ["RANK"]))
    engine = engine_of(plan, mesh, lowering)
    losses = []
    for step in range(3):
        batch = batch_of(step, rank, shape.data_size)
        if not split:
            losses.append(engine.step(batch).item())
            continue
        value = engine(batch)
        engine.backward(value)
        engine.optimizer_step()
        assert all(p.grad is None for p in engine.model.parameters())
        losses.append(value.item())
    assert engine.stats.compiles == (2 if split else 1)
    return losses, {name: value.full_tensor() for name, value in engine.state_dict().items()}


EAGER = [("zero3", "dp=2", "eager"), ("zero1", "dp=2", "eager"), ("tp", "tp=2", "eager")]
INDUCTOR = [("zero3", "dp=2", "inductor")]


def train_both_ways(cells):
    """One rank: every cell in the split use, and in steps."""
    return [[train(*cell, split) for split in (True, False)] for cell in cells]


@pytest.mark.parametrize("cells", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_the_split_use_is_the_step_bit_for_bit(cells):
    for cell, results in zip(cells, launch(train_both_ways, cells, ranks=2)[0], strict=True):
        (losses, parameters), (expected, wanted) = results
        assert losses == expected, cell
        for name, value in wanted.items():
            assert torch.equal(parameters[name], value), (cell, name)


def test_gradients_of_several_backwards_add_up():
    engine, accumulating = engine_of(), engine_of()
    for start in range(2):
        accumulating.backward(accumulating(batch_of(start)) / 2)
    with torch.no_grad():
        total = {
            name: p.grad.to_local().clone() for name, p in accumulating.model.named_parameters()
        }
    for start in range(2):
        engine.backward(engine(batch_of(start)) / 2)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter.grad.to_local(), total[name])
    first = {name: p.detach().to_local().clone() for name, p in engine.model.named_parameters()}
    engine.optimizer_step()
    assert engine.stats.steps == 1
    assert all(not torch.equal(p.to_local(), first[n]) for n, p in engine.model.named_parameters())


def test_two_forwards_before_a_backward_keep_their_own_values():
    """Other batches, other masks; what is saved belongs to its forward."""
    engine = engine_of(memory="full")
    one, two = engine(batch_of(0)), engine(batch_of(1))
    engine.backward(two)
    engine.backward(one)
    together = [p.grad.to_local().clone() for p in engine.model.parameters()]
    again = engine_of(memory="full")
    again.backward(again(batch_of(0)))
    again.backward(again(batch_of(1)))
    for have, parameter in zip(together, again.model.parameters(), strict=True):
        torch.testing.assert_close(have, parameter.grad.to_local())


@pytest.mark.parametrize("memory", ["none", "full"])
def test_running_statistics_are_the_forwards(memory):
    """As plain PyTorch has them: one update for each forward, whether or not a backward follows."""
    torch.manual_seed(0)
    plain = Net()
    plain.drop.p = 0.0
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters())
    engine = stepgraph.Engine(
        model, loss=loss, optimizer=optimizer, plan="ddp", memory=memory, lowering="eager"
    )
    kept = []
    for step in range(3):
        kept.append((engine(batch_of(step)), loss(plain, batch_of(step))))
        for name, value in plain.norm.named_buffers():
            have = engine.model.get_buffer(f"norm.{name}")
            torch.testing.assert_close(have, value, msg=f"{name} after {step + 1} forwards")
    for have, wanted in kept[:2]:
        engine.backward(have)
        wanted.backward()
    for name, parameter in plain.named_parameters():
        have = engine.model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(have, parameter.grad)


class Spectrum(nn.Module):
    """Complex parameters and results."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.gain = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.fft(self.a(x)) * self.gain


def gradients_of_a_spectrum(plan):
    """One rank: gradients through a complex result, and those of one process."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    plain, x = Spectrum(), torch.randn(4, 4)
    mine = x.chunk(ranks)[rank]
    model = stepgraph.parallelize(copy.deepcopy(plain), example=mine, plan=plan, lowering="eager")
    for module, rows in ((plain, x), (model, mine)):
        module(rows).abs().square().mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    return [p.grad.full_tensor() for p in model.parameters()], wanted


def test_complex_results_carry_gradients():
    for plan, results in (
        ("ddp", [gradients_of_a_spectrum("ddp")]),
        ("zero3", launch(gradients_of_a_spectrum, "zero3", ranks=2)),
    ):
        for found, wanted in results:
            for have, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(have, want, msg=plan)


def test_a_parameter_changed_in_between_is_an_error():
    engine = engine_of()
    one, two = engine(batch_of(0)), engine(batch_of(1))
    engine.backward(one)
    engine.optimizer_step()
    with pytest.raises(RuntimeError, match="between forward and backward"):
        engine.backward(two)


def test_a_second_backward_through_one_graph_is_torchs_error():
    engine = engine_of()
    value = engine(batch_of(0))
    engine.backward(value)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(value)


def test_what_cannot_be_meant_is_an_error():
    with pytest.raises(UsageError, match="micro_batches"):
        engine_of(micro_batches=2)(batch_of(0))
    with pytest.raises(UsageError, match="no parameter has a gradient"):
        engine_of().optimizer_step()
    with pytest.raises(UsageError, match="no optimizer"):
        stepgraph.Engine(Net(), loss=loss, lowering="eager").optimizer_step()
    with pytest.raises(UsageError, match="no option 'mode'"):
        engine_of().compile(mode="max-autotune")
    with pytest.raises(UsageError, match="unknown lowering"):
        engine_of().compile("fast")


def test_parameters_without_a_gradient_are_left_alone():
    engine = engine_of()
    engine.backward(engine(batch_of(0)))
    before = engine.model.a.weight.detach().to_local().clone()
    engine.model.a.weight.grad = None
    engine.optimizer_step()
    assert torch.equal(engine.model.a.weight.to_local(), before)


def test_a_group_that_joins_later_has_its_learning_rate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    groups = [{"params": layer.parameters(), "lr": 0.1} for layer in model]
    engine = stepgraph.Engine(
        model, loss=loss, optimizer=torch.optim.SGD(groups), plan="ddp", lowering="eager"
    )
    model[1].requires_grad_(False)
    engine.step(batch_of(0))
    model[1].requires_grad_(True)
    before = model[1].weight.detach().to_local().clone()
    engine.step(batch_of(1))
    assert not torch.equal(model[1].weight.to_local(), before)


def test_states_of_parameters_without_a_gradient_are_kept():
    engine = engine_of()
    engine.backward(engine(batch_of(0)))
    engine.optimizer_step()
    engine.backward(engine(batch_of(1)))
    engine.model.a.weight.grad = None
    engine.optimizer_step()
    assert len(engine._optimizer.state_dict()["state"]) == len(list(engine.model.parameters()))
