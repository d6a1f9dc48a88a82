"""Training with flex_attention equals hand-written attention in one process, however it is placed."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.cost.work import node_flops
from stepgraph.operators.flex import FLEX, FLEX_BACKWARD
from stepgraph.planning.request import Precision
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import adamw, notes_of

HEADS, WIDTH, STEPS = 4, 4, 3


class Attending(nn.Module):
    """Soft caps, a learned slope for each head, keys shared by two heads."""

    def __init__(self, counts):
        super().__init__()
        self.query = nn.Linear(16, HEADS * WIDTH)
        self.key, self.value = (nn.Linear(16, HEADS // 2 * WIDTH) for _ in range(2))
        self.out = nn.Linear(HEADS * WIDTH, 16)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, HEADS))
        self.temperature = nn.Parameter(torch.ones(()))
        self.counts = counts

    def rows(self, x):
        parts = (self.query(x), self.key(x), self.value(x))
        return [part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts]

    def score(self, score, row, head, query, key):
        score = 2 * torch.tanh(score / 2) * self.temperature + self.slopes[head] * (key - query)
        return score + {"rows": 0.3 * row, "heads": 0.3 * head}.get(self.counts, 0.0) * key

    def forward(self, x, mask):
        found = flex_attention(
            *self.rows(x), score_mod=self.score, block_mask=mask, enable_gqa=True
        )
        return x + self.out(found.transpose(1, 2).flatten(2))

    def by_hand(self, x, document):
        query, key, value = self.rows(x)
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        sizes = (len(x), HEADS, x.shape[1], x.shape[1])
        at = [
            torch.arange(n).view([-1 if i == d else 1 for i in range(4)])
            for d, n in enumerate(sizes)
        ]
        scores = (query.float() @ key.float().mT) * WIDTH**-0.5
        scores = 2 * torch.tanh(scores / 2) * self.temperature
        scores = scores + self.slopes[:, None, None] * (at[3] - at[2])
        scores = scores + {"rows": 0.3 * at[0], "heads": 0.3 * at[1]}.get(self.counts, 0.0) * at[3]
        same = document[:, None, :, None] == document[:, None, None, :]
        shares = scores.masked_fill(~(same & (at[2] >= at[3])), float("-inf")).softmax(-1)
        found = (shares.to(value.dtype) @ value).transpose(1, 2).flatten(2)
        return x + self.out(found)


class Flexible(nn.Module):
    """Two layers, within documents of the batch.

    Args:
        counts: scores depend on the number of ``rows``, so that nobody divides them; or of ``heads``.
    """

    def __init__(self, counts="", checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(Attending(counts) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x, document):
        rows, length = x.shape[:2]

        def same(row, head, query, key):
            return (document[row, query] == document[row, key]) & (query >= key)

        mask = create_block_mask(same, rows, None, length, length, device=x.device)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, mask, use_reentrant=False)
                if self.checkpointed
                else layer(x, mask)
            )
        return x.square().mean()

    def by_hand(self, x, document):
        for layer in self.layers:
            x = layer.by_hand(x, document)
        return x.square().mean()


def batch(rows=4):
    torch.manual_seed(1)
    return torch.randn(rows, 6, 16), torch.randint(0, 2, (rows, 6)).cumsum(1)


def make(**options):
    torch.manual_seed(0)
    return Flexible(**options)


def plain(model):
    """Losses and parameters of plain PyTorch."""
    optimizer, losses = adamw(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.by_hand(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(mesh, plan, model=None, **how):
    model = model or make()
    run = OneProcessRun(model, optimizer=adamw(model), mesh=mesh, plan=plan, **how)
    losses = [run.step(batch()).item() for _ in range(STEPS)]
    return run, (losses, run.parameters())


def queries(run):
    """Shapes of the queries of each attention, forward and backward."""
    calls = [n for n in run.programs["step"].operations() if n.target in (FLEX, FLEX_BACKWARD)]
    return [tuple(n.args[n.target is FLEX_BACKWARD].meta["val"].shape) for n in calls]


@pytest.mark.parametrize(
    ("mesh", "plan", "parts"),
    sampled(
        [
            ("dp=2,tp=2", "tp+sp+zero3", (2, 2)), ("dp=1", "ddp", (4, 4)), ("tp=2", "tp", (4, 2)),
            ("dp=4", "zero3", (1, 4)), ("replicate=2,shard=2", "hsdp", (1, 4)),
        ],
        every=5,
    ),
)  # fmt: skip
@pytest.mark.parametrize("memory", sampled(["full", "none"]))
def test_it_trains_as_by_hand_divided_by_rows_and_heads(mesh, plan, parts, memory):
    expected = plain(make())
    run, found = trained(mesh, plan, memory=memory)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert notes_of(run) == []
    assert set(queries(run)) == {(*parts, 6, WIDTH)}
    calls = [n for n in run.programs["step"].operations() if n.target is FLEX]
    whole = 2 * 2.0 * 4 * HEADS * 6 * 6 * WIDTH  # two products of all rows and heads
    assert {node_flops(n) for n in calls} == {whole * math.prod(parts) / (4 * HEADS)}
    if "sp" not in plan:  # with it no two of two layers are alike
        assert len(queries(run)) == (4 if memory == "none" else 6)


@pytest.mark.slow
def test_the_search_places_it_too():
    plan = stepgraph.plan(
        make(), example=batch(), mesh="dp=2,tp=2", placement="auto", device="h100",
        loss=lambda m, b: m(*b), compute_dtype=None,
    )  # fmt: skip
    _, found = trained("dp=2,tp=2", plan)
    torch.testing.assert_close(found, plain(make()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", sampled(["dp=2", "dp=1"]))
@pytest.mark.slow
def test_in_micro_batches(mesh):
    run, found = trained(mesh, "zero2", micro_batches=2)
    torch.testing.assert_close(found, plain(make()), rtol=1e-4, atol=1e-5)
    assert notes_of(run) == []


@pytest.mark.slow
def test_in_a_smaller_type_ranks_agree_with_one_process():
    how = {"precision": Precision(torch.bfloat16)}
    (_, one), (_, four) = trained("dp=1", "zero3", **how), trained("dp=2,tp=2", "tp+zero3", **how)
    torch.testing.assert_close(four[0], one[0], rtol=0.02, atol=0.01)
    torch.testing.assert_close(four[0], plain(make())[0], rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_in_a_checkpointed_region():
    run, found = trained("dp=2", "zero3", make(checkpointed=True))
    torch.testing.assert_close(found, plain(make()), rtol=1e-4, atol=1e-5)
    assert len(queries(run)) == 6


@pytest.mark.parametrize(("counts", "whole"), sampled([("rows", 0), ("heads", 1)]))
def test_what_counts_rows_or_heads_is_not_divided_by_them(counts, whole):
    expected = plain(make(counts=counts))
    run, found = trained("dp=2,tp=2", "tp+zero3", make(counts=counts))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {shape[whole] for shape in queries(run)} == {4}
    assert {shape[1 - whole] for shape in queries(run)} == {2}


class Bare(nn.Module):
    """Without functions of its own."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return flex_attention(q, q, q).square().mean()


def test_without_functions_rows_are_divided():
    model = Bare()
    run = OneProcessRun(model, optimizer=adamw(model), mesh="dp=2")
    run.step((torch.randn(4, 6, 16),))
    assert notes_of(run) == [] and set(queries(run)) == {(2, HEADS, 6, WIDTH)}
