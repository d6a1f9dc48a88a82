"""draw_seed: random operations of a graph take their seed from torch's generator."""

from __future__ import annotations

import torch

from stepgraph.capture.passes.draw_seed import draw_seed
from stepgraph.capture.passes.key_random_operations import key_random_operations
from stepgraph.graphwise.graph import input_name
from stepgraph.program import roles
from stepgraph.program.invariants import check_invariants
from tests.graph_support import graph_program
from tests.support import assert_golden

aten = torch.ops.aten


def keyed():
    x = torch.ones(4, requires_grad=True)
    return key_random_operations(graph_program(lambda x: torch.dropout(x, 0.5, True), x))


def test_the_seed_is_drawn_once_a_forward():
    before = keyed()
    after = draw_seed(before.copy(), 1)
    assert_golden(__file__, "draw_seed", before, after)
    assert roles.Seed() not in after.inputs
    assert sum(node.target is aten.randint.low for node in after.operations()) == 1


def test_ranks_draw_other_words():
    words = [
        next(
            n.args[1] for n in draw_seed(keyed(), rank).operations() if n.target is aten.add.Scalar
        )
        for rank in (0, 1, 2)
    ]
    assert len(set(words)) == 3


def test_a_graph_without_random_operations_draws_nothing():
    before = graph_program(lambda x: x.exp(), torch.ones(4, requires_grad=True))
    after = draw_seed(before.copy(), 1)
    assert [n.target for n in after.operations()] == [n.target for n in before.operations()]
    check_invariants(after)


def test_names_of_inputs_are_the_models_own():
    source = "L['self']._modules['layers']._modules['0']._parameters['weight']"
    assert input_name(source) == "layers.0.weight"
    assert input_name("L['x']") == "L['x']"
