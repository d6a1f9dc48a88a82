"""A Program in pieces: the same bits as the whole, and one body for what repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.lowering.bodies import Number
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.torch_internals.code import generate_code
from tests.end_to_end.models import bring
from tests.equivalence.random_programs import Case, cases, make_batch, make_model, sgd
from tests.lowering.pieces import PIECES, compare, pieces_of
from tests.sampling import sampled
from tests.support import HOST, bound, compiled, tiny_llama, token_batch

SETTINGS = settings(settings.get_profile("ci"), max_examples=3)


@pytest.fixture(autouse=True)
def in_pieces_is_a_lowering(monkeypatch):
    monkeypatch.setitem(LOWERINGS, "pieces", PIECES)


class Blocks(nn.Module):
    """Blocks that draw, keep statistics of their batch and share one matrix."""

    def __init__(self, count, width=6, drop=0.5):
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.Tanh(),
                nn.Dropout(drop), nn.Linear(2 * width, width),
            )
            for _ in range(count)
        )  # fmt: skip

    def forward(self, x):
        for block in self.blocks:
            x = x + self.shared(block(x))
        return x.square().mean()


def test_blocks_that_draw_and_write_buffers_are_one_body():
    torch.manual_seed(0)
    model = Blocks(12)
    found = compare(model, torch.randn(8, 6), lambda m, x: m(x))["step"]
    assert len(found) >= len(set(found)) + 6


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_ranks_compile_the_same_bodies(plan):
    """Where a rank's rows begin in what is drawn is an argument."""
    torch.manual_seed(0)
    model = Blocks(8)
    made = compiled(model, torch.randn(8, 6), ranks=2, plan=plan)
    ranks = [pieces_of(program) for program in bound(made.programs["step"])]
    texts = [[generated(body) for body in pieces.bodies] for pieces in ranks]
    assert texts[0] == texts[1]
    drawn = [call.given for pieces in ranks for call in pieces.calls]
    starts = {
        n.value for given in drawn for n in given if isinstance(n, Number) and "start" in n.of
    }
    assert len(starts) == 2


def generated(body):
    module = body.module()
    generate_code(module)
    return module.code


CELLS = {
    "ddp": {"mesh": "dp=2", "plan": "ddp"},
    "zero3": {"mesh": "dp=2", "plan": "zero3", "schedule": "auto"},
    "zero1, clipped": {"mesh": "dp=2", "plan": "zero1", "schedule": "auto", "clip": 0.1},
    "tp+zero3": {"mesh": "dp=2,tp=2", "plan": "tp+zero3", "schedule": "auto"},
    "layers:2": {"mesh": "dp=2", "plan": "zero3", "schedule": "auto", "memory": "layers:2"},
    "full": {"mesh": "dp=2", "plan": "zero3", "memory": "full"},
    "offloaded": {"mesh": "dp=2", "plan": "zero3", "schedule": "auto", "memory": "*=offload"},
    "micro-batches": {
        "mesh": "dp=2", "plan": "zero3", "schedule": "auto", "micro_batches": 3, "clip": 0.1,
    },
}  # fmt: skip


quick = pytest.mark.parametrize(
    "cell", sampled(["tp+zero3", *(cell for cell in CELLS if cell != "tp+zero3")], every=len(CELLS))
)


def bodies_of(cell, layers, run, target=HOST):
    """How many bodies each program of a Llama of so many layers has."""
    rows = 4 * CELLS[cell].get("micro_batches", 1)
    model, batch = tiny_llama(layers), token_batch(rows=rows)
    found = compare(model, batch, target=target, run=run, **CELLS[cell])
    assert all(found.values())
    return {name: len(set(calls)) for name, calls in found.items()}


@quick
def test_a_transformer_has_as_many_bodies_whatever_its_depth(cell):
    assert bodies_of(cell, 4, run=False) == bodies_of(cell, 6, run=True)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_transformer_of_many_buckets_has_no_more_bodies(cell):
    # A bucket holds four layers' gradients, and two layers' parameters.
    small = replace(HOST, call_bytes=8192)
    counts = [bodies_of(cell, layers, layers == 4, small) for layers in (4, 9)]
    few, many = counts
    assert few.keys() == many.keys() and all(many[name] <= few[name] for name in few)


@pytest.mark.parametrize(
    "name", sampled(["gpt2", "vit", "bert", "mixtral", "unet", "convolutional"], every=3)
)
def test_models_are_the_same_in_pieces(name):
    brought = bring(name)
    compare(brought.model, brought.batch, brought.loss, mesh="dp=2", plan="zero3")


@pytest.mark.slow
@given(case=cases(), times=st.integers(2, 5))
@SETTINGS
def test_random_layers_repeated_are_the_same_in_pieces(case: Case, times: int):
    case = replace(case, layers=case.layers * times)
    compare(
        make_model(case),
        make_batch(case, 0),
        lambda model, batch: model(*batch),
        sgd,
        case.mesh,
        case.plan,
        case.clip,
        memory=case.memory,
        micro_batches=case.micro_batches,
        schedule="auto",
    )


class Constants(nn.Module):
    """Reads tensors that are no parameters: they are the code's own."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x.square().mean()


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_constants_of_the_code_reach_what_is_compiled(layers):
    results = []
    for lowering in ("eager", "inductor"):
        torch.manual_seed(0)
        model = Constants(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = stepgraph.Engine(model, optimizer=optimizer, lowering=lowering)
        results.append([engine.step(torch.ones(2, 4)) for _ in range(3)])
    torch.testing.assert_close(*results)


def test_what_is_one_operation_is_not_compiled():
    """The compiler would make what there is already."""
    made = compiled(tiny_llama(4), token_batch(), ranks=2, plan="ddp", schedule="auto")
    pieces = pieces_of(bound(made.programs["step"])[0])
    computed = [
        (body.plain, [n.target for n in body.graph.nodes if n.op == "call_function"])
        for body in pieces.bodies
    ]
    assert all(plain or len(targets) > 1 for plain, targets in computed)
    single = [targets[0] for plain, targets in computed if plain and len(targets) == 1]
    assert [target.namespace for target in single] == ["aten"]
