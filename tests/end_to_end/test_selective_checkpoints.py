"""Policies of a region's own (``create_selective_checkpoint_contexts``): what runs is what torch runs."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import stepgraph
from stepgraph.program.copies import TO_HOST

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
WIDTH = 32


def policy(of_products, of_others):
    def says(context, op, *args, **kwargs):
        return CheckpointPolicy[of_products if op in PRODUCTS else of_others]

    return functools.partial(create_selective_checkpoint_contexts, says)


def every_other():
    """Every second product of a region is saved."""
    seen = 0

    def says(context, op, *args, **kwargs):
        nonlocal seen
        seen += op in PRODUCTS and not context.is_recompute
        kept = op in PRODUCTS and seen % 2
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(says)


POLICIES = {
    "products must be recomputed": policy("MUST_RECOMPUTE", "PREFER_SAVE"),
    "all must be recomputed": policy("MUST_RECOMPUTE", "MUST_RECOMPUTE"),
    "products must be saved": policy("MUST_SAVE", "PREFER_RECOMPUTE"),
    "products are better saved": policy("PREFER_SAVE", "MUST_RECOMPUTE"),
    "all must be saved": policy("MUST_SAVE", "MUST_SAVE"),
    "every other product": every_other,
    "a list": lambda: create_selective_checkpoint_contexts(list(PRODUCTS)),
}


class Block(nn.Module):
    def __init__(self, act, ends):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48)
        self.down, self.act, self.ends = nn.Linear(48, WIDTH), act, ends

    def forward(self, x):
        y = self.down(self.act(self.up(self.norm(x))))
        return self.act(y) if self.ends else x + y


class Net(nn.Module):
    def __init__(self, block, context):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.context = context

    def forward(self, x, y):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context)
        return (x - y).square().mean()


def batch():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(3, 4, WIDTH, generator=generator) for _ in range(2))


BLOCKS = {
    "gelu": lambda: Block(nn.functional.gelu, ends=False),
    "relu": lambda: Block(torch.relu, ends=False),
    "gelu at the end": lambda: Block(nn.functional.gelu, ends=True),
}


def by_torch(block, context):
    model = Net(block, context)
    with FlopCounterMode(display=False) as counter:
        model(*batch()).backward()
    return counter.get_total_flops(), {n: p.grad for n, p in model.named_parameters()}


def by_stepgraph(block, context):
    model = Net(block, context)
    engine = stepgraph.Engine(model, mesh="dp=1", plan="ddp", lowering="eager", strict=True)
    engine.step(batch())
    with FlopCounterMode(display=False) as counter:
        engine.step(batch())
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return counter.get_total_flops(), found


@pytest.mark.parametrize("says", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_products_that_torch_runs_are_run(block, says):
    flops, gradients = by_torch(BLOCKS[block], POLICIES[says])
    own, found = by_stepgraph(BLOCKS[block], POLICIES[says])
    assert own == flops
    torch.testing.assert_close(found, gradients)


def test_a_product_that_must_be_recomputed_is_behind_a_tanh_that_leaves_the_region():
    tanh = functools.partial(Block, torch.tanh, ends=True)
    context = POLICIES["products must be recomputed"]
    flops, gradients = by_torch(tanh, context)
    own, found = by_stepgraph(tanh, context)
    assert own == flops == 2 * (344_064 - 49_152) + 49_152  # two layers, one product outside
    torch.testing.assert_close(found, gradients)


def test_what_a_policy_offloads_waits_on_the_host():
    says = policy("MUST_CPU_OFFLOAD", "PREFER_RECOMPUTE")
    flops, gradients = by_torch(BLOCKS["gelu"], policy("MUST_SAVE", "PREFER_RECOMPUTE"))
    own, found = by_stepgraph(BLOCKS["gelu"], says)
    assert own == flops
    torch.testing.assert_close(found, gradients)
    engine = stepgraph.Engine(Net(BLOCKS["gelu"], says), mesh="dp=1", plan="ddp", lowering="eager")
    engine.step(batch())
    memory = engine.plan.decisions["step"].memory
    assert memory.offload and all(name.endswith("/mm") for name in memory.offload)
    assert all("layers." in name for name in memory.offload)
    assert not engine.notes
    assert sum(n.target is TO_HOST for n in engine.programs["step"].operations()) == len(
        memory.offload
    )


def test_dropout_in_a_region_is_recomputed_with_it():
    def block():
        return nn.Sequential(Block(torch.tanh, ends=True), nn.Dropout(0.1), nn.GELU())

    class Plain(Net):
        def forward(self, x, y):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return (x - y).square().mean()

    engine = stepgraph.Engine(Plain(block, None), mesh="dp=1", plan="ddp", lowering="eager")
    engine.step(batch())
    program = engine.programs["step"]
    again = {n.meta["recomputed_from"] for n in program.operations() if "recomputed_from" in n.meta}
    assert {f"layers.{i}.1/{op}" for i in (0, 1) for op in ("lt", "mul.1")} <= again
