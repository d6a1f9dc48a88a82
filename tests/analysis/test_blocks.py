"""find_blocks: repeated layers are found in the operations alone."""

import pytest
import torch
from torch import nn

from stepgraph.analysis.blocks import find_blocks
from stepgraph.program.program import FORWARD
from tests.sampling import sampled
from tests.support import captured, mlp, regression_batch, tiny_llama, token_batch


def gpt2(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=37,
            n_embd=16,
            n_layer=layers,
            n_head=2,
            n_positions=32,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
    )


def qwen3(layers):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=32,
            use_cache=False,
        )  # fmt: skip
    )


FAMILIES = {"llama": tiny_llama, "gpt2": gpt2, "qwen3": qwen3}


class Functional(nn.Module):
    """A model without submodules: repetition is a loop over plain parameters."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Parameter(torch.eye(8))
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(8)) for _ in range(2 * layers))

    def forward(self, x):
        x = x @ self.first
        weights = list(self.weights)  # dynamo of torch 2.11 does not slice a ParameterList
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = nn.functional.layer_norm(x, (8,))
            x = x + torch.tanh(y @ up) @ down
        return x.square().mean()


@pytest.mark.parametrize(("family", "layers"), sampled([("llama", 2), ("qwen3", 4), ("gpt2", 3)]))
def test_every_layer_of_a_transformer_is_one_block(family, layers):
    blocks = find_blocks(captured(FAMILIES[family](layers), token_batch(2)))
    assert len(blocks) == layers
    assert len({block.stop - block.start for block in blocks}) == 1


def test_blocks_of_a_model_without_submodules_are_found():
    assert len(find_blocks(captured(Functional(6), torch.randn(4, 8)))) == 6


def test_blocks_do_not_overlap_and_stay_inside_the_forward():
    program = captured(tiny_llama(4), token_batch(2))
    blocks = find_blocks(program)
    assert all(a.stop <= b.start for a, b in zip(blocks, blocks[1:], strict=False))
    assert blocks[0].start >= 0 and blocks[-1].stop <= len(list(program.operations(FORWARD)))


@pytest.mark.slow
def test_a_block_is_cut_at_the_residual_stream():
    program = captured(tiny_llama(4), token_batch(2))
    nodes = list(program.operations(FORWARD))
    position = {node: i for i, node in enumerate(nodes)}
    for block in find_blocks(program)[1:]:
        crossing = [
            node
            for node in nodes[: block.start]
            if any(position.get(user, -1) >= block.start for user in node.users)
        ]
        wide = [
            n for n in crossing if n.meta["val"].shape[-1:] == (16,) and n.meta["val"].dim() == 3
        ]
        assert len(wide) == 1


def test_nothing_repeats_in_a_small_network():
    assert find_blocks(captured(mlp(), regression_batch())) == []
