"""What waits for the backward: memory of its own, by who holds it."""

import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.memory.decide import decide
from stepgraph.memory.saved import saved_values, shown_in_forward, storage_of
from stepgraph.program.metadata import meta
from tests.support import captured, compiled, tiny_llama, token_batch

aten = torch.ops.aten


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8, bias=False)

    def forward(self, x):
        h = torch.exp(self.linear(x))
        return nn.functional.max_pool1d(h.view(2, 4, 8).mT, 2).square().sum()


def named(nodes):
    return [meta(node)["name"] for node in nodes]


def test_a_view_is_held_by_what_it_shows_and_one_of_several_results_by_itself():
    program = captured(Pooled(), torch.ones(8, 4))
    view = next(node for node in program.operations() if node.target is aten.transpose.int)
    assert storage_of(view, awaited=True).target is aten.exp.default
    assert view in shown_in_forward(storage_of(view, awaited=True))
    saved = saved_values(program, ())
    assert {storage_of(node, awaited=True) for node in saved} == {*saved}
    results = [node for node in saved if "getitem" in meta(node)["name"]]
    assert results and all(storage_of(node, awaited=True) is node for node in results)


def test_what_was_communicated_is_held_once_it_is_there():
    program = compiled(tiny_llama(1, num_key_value_heads=2), token_batch(4), ranks=2).programs[
        "step"
    ]
    waits = [node for node in program.operations() if node.target is torch_internals.WAIT]
    assert waits and all(storage_of(node, awaited=True) is node for node in waits)


def test_of_what_is_computed_again_its_sources_are_saved():
    program = captured(tiny_llama(2), token_batch(2))
    again = decide(program, "full").recompute
    kept, less = named(saved_values(program, ())), named(saved_values(program, again))
    assert len(less) < len(kept) / 2
    assert not {*less} & again.keys()
