"""One process under inductor, updates in torch's fused kernels among the backward: as plain PyTorch.

Other norms, other optimizers. A large ``eps`` shows of Adam the size of a gradient, not only its sign.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import stepgraph
from stepgraph.capture.module import default_loss

STEPS = 3
WORDS = 32
BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}


class Block(nn.Module):
    """Before a norm's own layer, and added to what it was given."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OfChannels(nn.Module):
    """A norm of [rows, channels, places] where the rest is of [rows, places, channels]."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Gain(nn.Module):
    """A learned scale, and nothing else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: OfChannels(nn.GroupNorm(2, 8)),
    "batch": lambda: OfChannels(nn.BatchNorm1d(8)),
    "gain": Gain,
}


def blocks(norm):
    model = nn.Sequential(*(Block(NORMS[norm]) for _ in range(5)))
    return model, lambda: {"x": torch.randn(6, 5, 8), "y": torch.randn(6, 5, 8)}, of_blocks


def of_blocks(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def gpt2():
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=8, vocab_size=WORDS, **still)
    return hf.GPT2LMHeadModel(config), tokens, default_loss


def bert():
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = hf.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **BERT, **still)
    return hf.BertForMaskedLM(config), tokens, default_loss


def tokens():
    ids = torch.randint(WORDS, (4, 8))
    return {"input_ids": ids, "labels": ids.clone()}


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
}
MODELS = {**{name: lambda name=name: blocks(name) for name in NORMS}, "gpt2": gpt2, "bert": bert}
FAST = [("layer", "adamw")]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, optimizer, marks=[] if (name, optimizer) in FAST else pytest.mark.slow)
        for name in MODELS
        for optimizer in OPTIMIZERS
    ],
)
def test_a_step_is_that_of_plain_pytorch(name, optimizer):
    torch.manual_seed(0)
    model, batches, loss = MODELS[name]()
    plain = copy.deepcopy(model)
    theirs, ours = (OPTIMIZERS[optimizer](m.parameters()) for m in (plain, model))
    engine = stepgraph.Engine(model, loss=loss, optimizer=ours, lowering="inductor")
    for _ in range(STEPS):
        batch = batches()
        theirs.zero_grad()
        expected = loss(plain, batch)
        expected.backward()
        theirs.step()
        assert engine.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    for (key, found), one in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), one, rtol=1e-4, atol=2e-6, msg=key)
