"""copy_views: a view for each reader, the same bits."""

from __future__ import annotations

import torch
from torch import nn

from stepgraph.operators.views import REARRANGES
from stepgraph.placement.passes.copy_views import copy_views
from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import OPTIMIZER
from tests.support import (
    adamw,
    assert_bitwise,
    captured,
    mlp,
    observed_pass,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


def shared_views(program):
    results = set(program.results)
    return [
        node.meta["name"]
        for node in program.operations()
        if node.target in REARRANGES and len(node.users) > 1 and node not in results
        and node.meta["phase"] != OPTIMIZER
    ]  # fmt: skip


def test_every_view_has_one_reader_and_every_result_the_same_bits():
    for model, batch in ((mlp(), regression_batch()), (tiny_llama(), token_batch())):
        before = captured(model, batch)
        after = copy_views(before.copy(), True)
        check_invariants(after, "copy_views")
        assert shared_views(before) and not shared_views(after)
        inputs = values(model, batch)
        assert_bitwise(inputs.execute([before]), inputs.execute([after]))


def test_where_views_may_be_shared_they_are():
    before = captured(mlp(), regression_batch())
    assert str(copy_views(before.copy(), False)) == str(before)


def test_copies_have_the_phase_of_their_reader_and_names_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            turned = self.weight.t()
            return (turned * x + turned.exp()).sum()

    before = captured(Twice(), torch.randn(4, 4))
    after = copy_views(before.copy(), True)
    names = [node.meta["name"] for node in after.operations()]
    assert len(names) == len(set(names))
    for node in after.operations():
        if node.target in REARRANGES:
            assert all(user.op == "output" or user.meta["phase"] == node.meta["phase"]
                       for user in node.users)  # fmt: skip
    assert len(names) > len(list(before.operations()))


def test_the_update_is_left_as_it_is():
    model, batch = mlp(), regression_batch()
    before, _, _ = observed_pass("place_values", model=model, batch=batch, optimizer=adamw(model))
    count = len(list(before.operations(OPTIMIZER)))
    assert len(list(copy_views(before.copy(), True).operations(OPTIMIZER))) == count
