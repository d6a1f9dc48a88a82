"""The named memory policies."""

import operator

import pytest
import torch
import torch.utils.checkpoint

from stepgraph.errors import MemoryPolicyError, UsageError
from stepgraph.memory.decide import decide
from stepgraph.memory.presets import parse_policy
from tests.support import captured, mlp, regression_batch, tiny_llama, token_batch


@pytest.fixture(scope="module")
def program():
    return captured(tiny_llama(4), token_batch(2))


def test_policies_are_parsed():
    assert parse_policy("none") == ("none", 0)
    assert parse_policy("full") == ("full", 1)
    assert parse_policy("layers:3") == ("layers", 3)


@pytest.mark.parametrize(
    "text", ["", "ful", "layers", "layers:0", "layers:-1", "layers:x", "none:1"]
)
def test_an_unknown_policy_lists_the_known_ones(text):
    with pytest.raises(UsageError, match="none, full, layers:N"):
        parse_policy(text)


@pytest.mark.parametrize(("policy", "blocks"), [("none", 0), ("full", 4), ("layers:2", 2)])
def test_a_policy_recomputes_so_many_blocks(program, policy, blocks):
    assert len(set(decide(program, policy).recompute.values()) - {-1}) == blocks


def test_layers_without_repetition_are_an_error_and_full_is_one_block():
    program = captured(mlp(), regression_batch())
    with pytest.raises(MemoryPolicyError, match="no block of this model repeats"):
        decide(program, "layers:2")
    decision = decide(program, "full")
    assert decision.recompute and "no block repeats" in decision.notes[0]


def test_the_users_own_checkpoint_regions_are_recomputed_under_every_policy():
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(
                lambda x: torch.tanh(self.linear(x)), x, use_reentrant=False
            )
            return y.sin().sum()

    program = captured(Checkpointed(), torch.randn(2, 4))
    recomputed = decide(program, "none").recompute
    assert any("mm" in name for name in recomputed)
    assert not any("sin" in name for name in recomputed)


@pytest.mark.parametrize("memory", ["full", "layers:2"])
def test_what_is_kept_are_tensors(program, memory):
    recomputed = decide(program, memory).recompute
    parts = [node for node in program.operations() if node.target is operator.getitem]
    parts = [node for node in parts if node.meta["name"] in recomputed]
    assert all(node.args[0].meta["name"] in recomputed for node in parts)


class OneLayer(torch.nn.Module):
    """Projections of queries, keys and values look alike, and are no blocks."""

    def __init__(self):
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        heads = [p(x).view(2, 4, 2, 4).transpose(1, 2) for p in self.projections[:3]]
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return (x + self.projections[3](attended.transpose(1, 2).flatten(2))).square().mean()


def test_one_layer_is_one_block_whose_inputs_alone_are_kept():
    program = captured(OneLayer(), torch.randn(2, 4, 8))
    decision = decide(program, "full")
    assert "no block repeats" in decision.notes[0]
    kept = {n.meta["name"] for n in program.operations("forward")} - decision.recompute.keys()
    assert kept == {"mean"}
    with pytest.raises(MemoryPolicyError, match="no block of this model repeats"):
        decide(program, "layers:2")
