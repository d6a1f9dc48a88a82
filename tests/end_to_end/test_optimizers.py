"""Every optimizer of ``torch.optim``, divided over ranks: what one process computes, or a clear error."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.equivalence.check import check_model
from stepgraph.errors import OptimizerError
from stepgraph.program.collectives import is_collective
from tests.one_process import OneProcessRun

# 13 and 7 divide over no number of ranks; Muon takes matrices alone.
KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
REFUSED = ("Adafactor", "LBFGS", "SparseAdam")
PLANS = (("ddp", "dp=2"), ("zero1", "dp=2"), ("zero3", "dp=2"), ("tp", "dp=1,tp=2"))


class Net(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(7, 13, bias), nn.Linear(13, 7, bias)

    def forward(self, x, y):
        return (self.down(torch.tanh(self.up(x))) - y).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, 7, generator=generator) for _ in range(2))


def made(name):
    model = Net(bias=name != "Muon")
    return model, KINDS[name](model.parameters(), lr=0.01)


def is_checked(name, plan, mesh):
    model, optimizer = made(name)
    report = check_model(
        model, optimizer=optimizer, batch=batch(0), mesh=mesh, plan=plan, entries=("step",)
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
@pytest.mark.parametrize("name", ["Rprop", "Muon"])
def test_an_update_that_does_not_go_element_by_element_is_divided(name, plan):
    is_checked(name, plan, "dp=2")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "mesh"), PLANS)
@pytest.mark.parametrize("name", [n for n in KINDS if n not in ("Optimizer", *REFUSED)])
def test_all_of_them_are(name, plan, mesh):
    is_checked(name, plan, mesh)


@pytest.mark.parametrize("name", ["Rprop", "Muon"])
def test_the_parameters_are_those_of_one_process(name):
    model, optimizer = made(name)
    other, own = made(name)
    run = OneProcessRun(other, optimizer=own, mesh="dp=2", plan="zero3")
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run.step(batch(step)), loss.detach())
    torch.testing.assert_close(run.parameters(), dict(model.named_parameters()))


@pytest.mark.parametrize(("plan", "wanted"), [("zero3", 2), ("zero1", 3)])
def test_a_whole_matrix_is_gathered_once(plan, wanted):
    model, optimizer = made("Muon")
    run = OneProcessRun(model, optimizer=optimizer, mesh="dp=2", plan=plan)
    run.step(batch(0))
    update = run.programs["step"].operations("optimizer")
    assert (
        sum(is_collective(node) for node in update) == wanted
    )  # of two matrices; and the parameters


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_functional_is_an_error(name):
    model, optimizer = made(name)
    engine = stepgraph.Engine(model, optimizer=optimizer, mesh="dp=1", lowering="eager")
    with pytest.raises(OptimizerError, match=name):
        engine.step(batch(0))


class Masked(nn.Module):
    """Writes a number where a mask says so, of elements and of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(7, 7)

    def forward(self, x, y):
        x = self.linear(x)
        x[x > 1] = 0.5
        x[y.sum(1) > 0] = 0.0
        return (x - y).square().mean()


def test_numbers_written_by_a_mask_stay_on_their_ranks():
    model = Masked()
    wanted = model(*batch(0))
    run = OneProcessRun(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="dp=2")
    torch.testing.assert_close(run.step(batch(0)), wanted.detach())
    forward = [n for n in run.programs["step"].operations("forward") if is_collective(n)]
    assert len(forward) <= 3  # parameters, and the loss
