"""Dropout: one mask, whatever the mesh, the micro-batches, the recomputation or the lowering."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture.step import Captured
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.check import check_model
from stepgraph.equivalence.comparing import relative_difference, tolerance
from stepgraph.program.record import DISTRIBUTION
from tests.one_process import OneProcessRun

STEPS = 3
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


class Block(nn.Module):
    """Dropout on activations, in attention, on a residual, and noise."""

    def __init__(self, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.outer(F.dropout(F.gelu(self.inner(x)), 0.3, self.training)))
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        p = 0.2 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)
        return x + mixed.transpose(1, 2).flatten(2) + 0.01 * torch.randn_like(x)


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 5)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def net(blocks=2):
    torch.manual_seed(0)
    return Net(blocks)


def batch(step=0):
    random = torch.Generator().manual_seed(step)
    return (
        torch.randn(16, 3, 8, generator=random),
        torch.randint(0, 5, (16, 3), generator=random),
    )


captured: dict[tuple[int, int], Captured] = {}


def run(mesh="dp=1", plan="ddp", memory="none", micro_batches=1, seed=0, blocks=2):
    """Losses and parameters of a few steps, all ranks in this process."""
    model = net(blocks)
    made = OneProcessRun(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh=mesh,
        plan=plan,
        memory=memory,
        micro_batches=micro_batches,
        seed=seed,
        captured=captured.get((micro_batches, blocks)),
    )
    losses = [made.step(batch(step)) for step in range(STEPS)]
    captured[micro_batches, blocks] = made.captured
    return {"loss": torch.stack(losses)} | made.parameters()


@pytest.fixture(scope="module")
def alone():
    return run()


def assert_close(got, expected):
    for name in expected:
        difference = relative_difference(got[name], expected[name])
        assert difference <= tolerance([expected[name]]), (name, difference)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_every_mesh_draws_the_same_masks(plan, ranks, micro_batches, alone):
    assert_close(run(f"dp={ranks}", plan, micro_batches=micro_batches), alone)


@pytest.mark.parametrize(
    ("plan", "mesh", "micro_batches"),
    [
        ("tp", "tp=2", 4),
        ("tp+sp", "tp=3", 1),
        ("tp+zero3", "dp=2,tp=2", 4),
        ("tp+sp+zero1", "dp=4,tp=2", 1),
        ("hsdp", "replicate=2,shard=2", 4),
        ("tp+hsdp", "replicate=2,shard=2,tp=2", 1),
    ],
)
def test_every_dimension_does(plan, mesh, micro_batches, alone):
    assert_close(run(mesh, plan, micro_batches=micro_batches), alone)


@pytest.mark.parametrize(
    ("mesh", "plan", "memory", "micro_batches"),
    [
        ("dp=2", "zero3", "full", 1),
        ("dp=2", "zero3", "layers:1", 2),
        ("dp=2,tp=2", "tp+zero2", "full", 2),
        ("replicate=2,shard=2", "hsdp", "layers:1", 1),
    ],
)
def test_recomputation_changes_no_bit(mesh, plan, memory, micro_batches):
    kept = run(mesh, plan, micro_batches=micro_batches)
    recomputed = run(mesh, plan, memory, micro_batches)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def rows_that_count(y):
    kept = (torch.rand(len(y)) < 0.5).float()
    return (y.square().sum(1) * kept).sum() / kept.sum()


def numbers_that_count(y):
    flat = y.reshape(-1)
    kept = (torch.rand(flat.shape) < 0.5).float()
    return (flat.square() * kept).sum() / kept.sum()


def columns_that_count(y):
    kept = (torch.rand(y.shape[1], len(y)) < 0.5).float()
    return (y.t().square() * kept).sum() / kept.sum()


def shuffled_places_that_count(y):
    """As in a masked autoencoder: the same number of each row."""
    kept = torch.ones_like(y)
    kept[:, :2] = 0
    kept = kept.gather(1, torch.rand(y.shape).argsort(1))
    return (y.square() * kept).sum() / kept.sum()


MASKED = [rows_that_count, numbers_that_count, columns_that_count, shuffled_places_that_count]


@pytest.mark.parametrize("loss", MASKED, ids=lambda loss: loss.__name__)
def test_a_mask_that_is_counted_is_one_whatever_cuts_the_batch(loss):
    def trained(mesh="dp=1", micro_batches=1):
        torch.manual_seed(0)
        model = nn.Linear(4, 6)
        made = OneProcessRun(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, x: loss(model(x)),
            mesh=mesh,
            plan="ddp",
            micro_batches=micro_batches,
        )
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return {"loss": made.step(x)} | made.parameters()

    alone = trained()
    for cut in ({"micro_batches": 4}, {"mesh": "dp=2"}, {"mesh": "dp=2", "micro_batches": 4}):
        assert_close(trained(**cut), alone)


def test_another_seed_and_another_step_draw_other_masks(alone):
    assert not torch.equal(run(seed=1)["loss"], alone["loss"])
    model = net()
    made = OneProcessRun(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    assert made.step(batch()) != made.step(batch())


@pytest.mark.slow
def test_the_checker_follows_every_pass():
    report = check_model(net(), batch=batch(), mesh="dp=2", micro_batches=2, memory="full")
    assert report.ok, str(report)
    drawn = {
        (check.program, check.name) for check in report.passes if check.preserves == DISTRIBUTION
    }
    captured_apart = ("step", "evaluate", "gradients")
    assert drawn == {
        *((program, "key_random_operations") for program in captured_apart),
        *((program, "draw_by_global_row") for program in (*captured_apart, "accumulate")),
    }


def train(lowering, steps=STEPS):
    """One rank of a run; returns losses, parameters and an evaluation."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    model = net(blocks=1)  # which takes inductor half as long
    engine = stepgraph.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan="zero3",
        micro_batches=2,
        memory="full",
        lowering=lowering,
    )
    parts = [[part.chunk(ranks)[rank] for part in batch(step)] for step in range(steps)]
    losses = torch.stack([engine.step(part) for part in parts])
    found = {n: p.detach().full_tensor() for n, p in engine.model.named_parameters()}
    # Masks are off in evaluation; one lowering is enough to see it.
    evaluated = engine.evaluate(parts[0]) if lowering == "eager" else None
    return {"loss": losses} | found, evaluated


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_two_real_ranks_draw_them_too(lowering):
    results, alone = launch(train, lowering, ranks=2), run(blocks=1)
    for found, evaluated in results:
        assert_close(found, alone)
        assert evaluated == results[0][1]


def test_both_lowerings_draw_the_same_bits():
    """Masks of ones: a result shows each mask, and nothing that sums."""

    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x):
            noise = torch.randn_like(x) + torch.rand_like(x) + torch.empty_like(x).exponential_()
            return F.dropout(x, 0.5), torch.randint_like(x, 100), noise * self.one

    x = torch.ones(64, 33)
    results = []
    for lowering in ("eager", "inductor"):
        engine = stepgraph.Engine(Masks(), loss=lambda m, b: m(b), lowering=lowering, seed=11)
        engine.model.train()
        results.append(engine.evaluate(x))  # these draw in evaluation mode, too, but for dropout
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
