"""Training with operators that are not torch's equals the same model in plain operators, on every mesh."""

import pytest
import torch

from tests.one_process import OneProcessRun
from tests.own_operators import (
    GROUPED,
    GROUPED_SHARDING,
    NORM,
    NORM_BACKWARD,
    Experts,
    Normed,
    registered,
    registered_norm,
    rows_of,
)
from tests.support import adamw, notes_of

STEPS = 3
ROWS = rows_of(4, 6, 8)


def plain(model, batch):
    """Losses and parameters of plain PyTorch."""
    optimizer, losses = adamw(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(model, batch, mesh, plan):
    run = OneProcessRun(model, optimizer=adamw(model), mesh=mesh, plan=plan)
    losses = [run.step(batch).item() for _ in range(STEPS)]
    return run, (losses, run.parameters())


def calls(run, target):
    return [n for n in run.programs["step"].operations() if n.target is target]


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=1", "zero3"), ("dp=2", "zero3"), ("tp=2", "tp+sp"), ("dp=2,tp=2", "tp+sp+zero3")],
)
def test_a_registered_norm_trains_as_plain_operators_do(mesh, plan):
    expected = plain(Normed(fused=False), ROWS)
    with registered_norm():
        run, found = trained(Normed(), ROWS, mesh, plan)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert notes_of(run) == []
    rows = {"dp=1": (4, 6), "dp=2": (2, 6), "tp=2": (4, 3), "dp=2,tp=2": (2, 3)}[mesh]
    assert len(calls(run, NORM)) == len(calls(run, NORM_BACKWARD)) == 3
    within = [n.args[0].meta["val"].shape for n in calls(run, NORM)[1:]]
    assert within == [(*rows, 8)] * 2  # what came before was sharded


@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "zero3"), ("tp=2", "tp"), ("dp=2,tp=2", "tp+zero3")]
)
def test_an_operator_that_nobody_registered_is_replicated(mesh, plan):
    expected = plain(Normed(fused=False), ROWS)
    run, found = trained(Normed(), ROWS, mesh, plan)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(n.args[0].meta["val"].shape == (4, 6, 8) for n in calls(run, NORM))
    notes = [note for note in notes_of(run) if "tested.norm.default has no sharding rule" in note]
    assert bool(notes) == ("dp" in mesh)
    assert all("stepgraph.register_operator(" in note for note in notes)


@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "zero3"), ("tp=2", "tp"), ("dp=2,tp=2", "tp+zero3")]
)
def test_a_grouped_product_trains_in_any_way(mesh, plan):
    batch = rows_of(4, 8)
    expected = plain(Experts(), batch)
    with registered(grouped={"sharding": GROUPED_SHARDING}):
        run, found = trained(Experts(), batch, mesh, plan)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert notes_of(run) == []
    weights = {tuple(n.args[1].meta["val"].shape) for n in calls(run, GROUPED)[:2]}
    whole = {(4, 8, 16), (4, 16, 8)}
    assert (weights == whole) == (mesh == "dp=2")  # tensor parallelism shards them
