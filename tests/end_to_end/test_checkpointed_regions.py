"""Models with ``torch.utils.checkpoint`` in them are the models without, but for what is kept."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.analysis.blocks import find_blocks
from stepgraph.program.metadata import meta
from tests.sampling import sampled
from tests.support import captured, tiny_llama, token_batch

ROWS, WIDTH = 8, 16
PLAIN, REENTRANT, NOT_REENTRANT = None, True, False


class Block(nn.Module):
    """Products, a norm, dropout, of a module's and of a function's."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24)
        self.down, self.drop = nn.Linear(24, WIDTH), nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        inner = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.2, self.training)
        return x + self.drop(self.down(inner)) * scale


class Net(nn.Module):
    """Blocks, each in a region; two in one region of a method; one in a region of a function's."""

    def __init__(self, how=PLAIN):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.layers = nn.ModuleList(Block() for _ in range(5))

    def region(self, function, *args):
        if self.how is PLAIN:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.how)

    def pair(self, x):
        return self.region(self.layers[1], self.layers[0](x))

    def forward(self, x, y):
        x = self.region(self.pair, x)
        x = self.region(lambda x: self.layers[2](x, scale=0.5).sin(), x)
        for layer in self.layers[3:]:
            x = self.region(layer, x)
        return (x - y).square().mean()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))


def names(program, phase=None):
    return [meta(node)["name"] for node in program.operations(phase)]


def regions(program):
    return {n.meta["checkpoint"] for n in program.operations() if "checkpoint" in n.meta}


def llama(how):
    model = tiny_llama(layers=3, attention_dropout=0.1).train()
    if how is not PLAIN:
        model.activation_checkpointing_enable({"use_reentrant": how})
    return model


@pytest.mark.parametrize(
    ("make", "given", "count", "how"),
    sampled(
        [
            (make, given, count, how)
            for make, given, count in ((Net, batch(), 4), (llama, token_batch(4), 3))
            for how in (REENTRANT, NOT_REENTRANT)
        ],
        every=3,
    ),
)
def test_operations_have_the_names_that_they_have_without(make, given, count, how):
    with_regions, without = captured(make(how), given), captured(make(PLAIN), given)
    assert len(regions(with_regions)) == count and not regions(without)
    assert names(with_regions) == names(without)
    assert find_blocks(with_regions) == find_blocks(without) != []


def losses(how, steps=3, **options):
    model = Net(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"mesh": "dp=1", "lowering": "eager", "plan": "zero3", **options}
    engine = stepgraph.Engine(model, optimizer=optimizer, strict=True, **options)
    return [engine.step(batch(step)).item() for step in range(steps)], engine


@pytest.mark.parametrize("how", sampled([NOT_REENTRANT, REENTRANT]))
def test_dropout_draws_the_same_masks(how):
    plain, _ = losses(PLAIN)
    with_regions, engine = losses(how)
    assert with_regions == plain
    assert any("recomputed_from" in n.meta for n in engine.programs["step"].operations())


@pytest.mark.slow
def test_a_plan_applies_with_regions_and_without(tmp_path):
    plain, engine = losses(PLAIN)
    for kept, how in (("without.json", NOT_REENTRANT), ("with.json", PLAIN)):
        engine.plan.save(tmp_path / kept)
        again, engine = losses(how, plan=tmp_path / kept)
        assert again == plain


def graph_by_graph(how):
    class Broken(Net):
        def forward(self, x, y):
            x = x * 2
            torch._dynamo.graph_break()
            return super().forward(x, y)

    model = Broken(how)
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="dp=1", lowering="eager"
    )
    return [engine.step(batch(step)).item() for step in range(2)], engine.programs


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled([REENTRANT, NOT_REENTRANT]))
def test_graph_by_graph_names_and_masks_are_the_same_too(how):
    plain, programs = graph_by_graph(PLAIN)
    with_regions, others = graph_by_graph(how)
    assert len(programs) == len(others)
    for one, other in zip(programs.values(), others.values(), strict=True):
        # what the backward alone reads is recomputed there
        assert {*names(other, "forward")} <= {*names(one, "forward")}
    assert with_regions == plain
