"""recognise_masks: attention learns what its mask of constants says; any other mask stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.index_rows_in_place import index_rows_in_place
from stepgraph.capture.passes.recognise_masks import recognise_masks
from tests.support import (
    assert_golden,
    assert_summation,
    captured,
    tiny_llama,
    token_batch,
    values,
)

LENGTH = 6


class Attending(nn.Module):
    """Self-attention under ``mask(x)``."""

    def __init__(self, mask):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.mask = mask

    def forward(self, x):
        q = (x * self.weight).unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x)).square().sum()


def positions(x, lengths=1):
    return torch.arange(LENGTH)[None, :].expand(x.shape[0], LENGTH * lengths)


def keys_before_queries(x):
    at = positions(x)
    return at[:, None, None, :] <= at[:, None, :, None]


def square(value=1.0, dtype=torch.bool):
    return torch.full((LENGTH, LENGTH), value, dtype=dtype)


CAUSAL = {
    "keys before queries": keys_before_queries,
    "queries after keys": lambda x: positions(x)[:, None, :, None] >= positions(x)[:, None, None],
    "not later": lambda x: ~(positions(x)[:, None, None] > positions(x)[:, None, :, None]),
    "before the next": lambda x: positions(x)[0] < positions(x)[0][:, None] + 1,
    "of one document": lambda x: (
        keys_before_queries(x) & (torch.zeros(LENGTH) == torch.zeros(LENGTH)[:, None])
    ),
    "lower triangle": lambda x: square().tril(),
    "upper triangle": lambda x: square(-torch.inf, torch.float32).triu(1),
    "as numbers": lambda x: torch.where(keys_before_queries(x), 0.0, torch.finfo(x.dtype).min),
    "the other way": lambda x: torch.where(~keys_before_queries(x), -torch.inf, 0.0),
}
NOTHING_HIDDEN = {
    "all": lambda x: square(),
    "no number": lambda x: torch.zeros(x.shape[0], 1, LENGTH, LENGTH),
    "from the first": lambda x: (positions(x) >= 0)[:, None, None, :].expand(-1, 1, LENGTH, -1),
}
STAYS = {
    "strictly before": lambda x: (positions(x)[0] - 1 < positions(x)[0][:, None] - 1) | square().tril(),
    "one more": lambda x: positions(x)[0] <= positions(x)[0][:, None] + 1,
    "a window": lambda x: square().tril() & square().triu(-2),
    "the first hidden": lambda x: (positions(x)[0] > 0) & square().tril() | (square().tril(-5)),
    "two documents": lambda x: (
        keys_before_queries(x) & (positions(x)[0] // 3 == positions(x)[0][:, None] // 3)
    ),
    "backwards": lambda x: (5 - positions(x)[0]) <= (5 - positions(x)[0])[:, None],
    "half a bias": lambda x: torch.where(keys_before_queries(x), 0.0, -1.0),
    "a distance": lambda x: torch.where(keys_before_queries(x), 0.5, -torch.inf),
    "of the batch": lambda x: (x[:, None, :, :1] > -9) & keys_before_queries(x),
    "lower triangle of an input": lambda x: x[..., :1].expand(-1, -1, LENGTH).tril()[:, None],
}  # fmt: skip


def attention(program):
    return [n for n in program.operations() if "attention" in str(n.target)]


def mask_of(node):
    return node.args[4 if "backward" in str(node.target) else 3]


def before_and_after(model, batch):
    program = index_rows_in_place(drop_identities(captured(model, batch)))
    return program, recognise_masks(program.copy())


@pytest.mark.parametrize("name", [*CAUSAL, *NOTHING_HIDDEN, *STAYS])
def test_what_a_mask_says_is_known_or_it_stays(name):
    model = Attending((CAUSAL | NOTHING_HIDDEN | STAYS)[name])
    batch = torch.randn(3, LENGTH, 4, generator=torch.Generator().manual_seed(0))
    program, after = before_and_after(model, batch)
    assert len(attention(after)) == 2
    for node in attention(after):
        assert node.args[-3] == (name in CAUSAL)
        assert (mask_of(node) is not None) == (name in STAYS)
    inputs = values(model, batch)
    assert_summation(inputs.execute(program), inputs.execute(after))


def test_transformers_write_no_mask():
    batch = token_batch(rows=2, length=5)
    without = {key: batch[key] for key in ("input_ids", "labels")}
    model = tiny_llama(layers=1)
    program, after = before_and_after(model, without)
    assert any(_is_square(node, 5) for node in program.operations())
    assert not any(_is_square(node, 5) for node in after.operations())
    inputs = values(model, without)
    assert_summation(inputs.execute(program), inputs.execute(after))
    _, masked = before_and_after(model, batch)
    assert all(mask_of(node) is not None for node in attention(masked))


def _is_square(node, length):
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.shape[-2:] == (length, length)


def test_golden():
    model = Attending(keys_before_queries)
    assert_golden(__file__, "recognise_masks", *before_and_after(model, torch.ones(2, LENGTH, 4)))


def test_a_long_mask_is_recognised_without_being_made(monkeypatch):
    """32,768 tokens: the mask would have a thousand million elements."""
    monkeypatch.setitem(globals(), "LENGTH", 32768)
    _, after = before_and_after(Attending(keys_before_queries), torch.ones(1, LENGTH, 4))
    assert all(mask_of(node) is None for node in attention(after))
