"""Buckets hold whole layers, as many each as have room."""

import itertools

import pytest
import torch
from torch import nn

from stepgraph.cost.collectives import moved_bytes
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD
from stepgraph.schedule.buckets import Sizes, find_buckets
from tests.sampling import sampled
from tests.support import adamw, compiled, tiny_llama, token_batch

LAYERS = 6
LARGE = 10**9


@pytest.fixture(scope="module")
def program():
    model = tiny_llama(LAYERS)
    made = compiled(model, token_batch(), adamw(model), ranks=2, plan="zero3", memory="full")
    return made.programs["step"]


def layer_bytes(program):
    """Bytes of a layer's gathers in the backward."""
    gathers = [n for n in program.operations(BACKWARD) if is_collective(n)]
    of_a_layer = [n for n in gathers if meta(n)["name"].startswith("model.layers.1.")]
    return sum(moved_bytes(n) for n in of_a_layer if "all_gather" in str(n.target))


def layers_of(buckets, kind):
    """Which layers each bucket of the backward has something of."""
    chosen = [names for names in buckets if kind in names[0] and ".backward" in names[0]]
    parts = [{n.split(".")[2] for n in names if n.startswith("model.layers.")} for names in chosen]
    return [sorted(map(int, layers)) for layers in parts if layers]


@pytest.mark.parametrize(
    "room, each", sampled([(2.4, 2), (1.2, 1), (4.9, 3), (20, LAYERS)], every=4)
)
def test_as_many_whole_layers_as_have_room(program, room, each):
    most = int(room * layer_bytes(program))
    found = layers_of(find_buckets(program, Sizes(LARGE, most, most, LARGE)), "all_gather")
    assert sorted(layer for layers in found for layer in layers) == [*range(LAYERS)]
    assert {len(layers) for layers in found} == {each}


def test_a_layer_that_has_no_room_is_split_as_the_others_are(program):
    most = layer_bytes(program) // 2
    buckets = find_buckets(program, Sizes(LARGE, most, most, LARGE))
    inner = [
        tuple(name.replace(f"layers.{layer}.", "layers.N.") for name in names)
        for names in buckets
        for layer in (2, 3)
        if all(name.startswith(f"model.layers.{layer}.") for name in names)
        and "all_gather" in names[0]
    ]
    assert len(inner) > 2
    assert all(inner.count(names) == 2 for names in inner)


class Widths(nn.Module):
    """Layers of matrices and biases of many sizes."""

    def __init__(self, layers):
        super().__init__()
        widths = (8, 32, 12, 20, 8)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            y = x
            for linear in layer:
                y = torch.tanh(linear(y))
            x = x + y
        return x.square().mean()


@pytest.mark.parametrize("large, each", sampled([(1500, 1), (LARGE, LAYERS)]))
def test_layers_that_wait_for_large_ones_have_one_each(large, each):
    model = Widths(LAYERS)
    made = compiled(model, torch.randn(4, 8), adamw(model), ranks=2, plan="zero3", memory="full")
    buckets = find_buckets(made.programs["step"], Sizes(large - 1, LARGE, LARGE, LARGE))
    found = [
        {name.split(".")[1] for name in names}
        for names in buckets
        if "reduce_scatter" in names[0] and len(names) > 2
    ]
    assert {len(layers) for layers in found} == {each}
