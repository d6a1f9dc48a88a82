"""What transformers' models set up at their first call is there before a forward is captured again."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.first_call import set_up
from stepgraph.errors import StrictError

ROWS = 4


def segformer():
    """Its decoder asks for the hidden states of its encoder."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )  # fmt: skip
    pixels, labels = torch.randn(ROWS, 3, 32, 32), torch.randint(0, 3, (ROWS, 32, 32))
    return SegformerForSemanticSegmentation(config), {"pixel_values": pixels, "labels": labels}


def llava():
    """Its language model is given the hidden states of one layer of its image encoder."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes},
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": 16,
            "patch_size": 8,
            **sizes,
        },
        image_token_index=5,
    )
    words = torch.cat([torch.full((ROWS, 4), 5), torch.randint(6, 64, (ROWS, 6))], 1)
    pixels = torch.randn(ROWS, 3, 16, 16)
    batch = {"input_ids": words, "labels": words.clone(), "pixel_values": pixels}
    return LlavaForConditionalGeneration(config), batch


@pytest.mark.parametrize("build", [segformer, llava])
def test_such_a_model_is_captured_whole_and_trains_as_it_does_in_plain_pytorch(build):
    torch.manual_seed(0)
    model, batch = build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = stepgraph.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lowering="eager",
    )
    assert engine.graph_by_graph(batch) is None
    with stepgraph.no_recompiles(after=1):
        losses = [engine.step(batch).item() for _ in range(2)]
    evaluated = engine.evaluate(batch)
    plain, _ = build()
    plain.load_state_dict(state)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, value in plain.named_parameters():
        trained = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(trained, value.detach(), msg=lambda m, n=name: f"{n}: {m}")
    assert evaluated.item() == pytest.approx(plain.eval()(**batch).loss.item(), rel=1e-5)


def hooks(model):
    return {name: len(module._forward_hooks) for name, module in model.named_modules()}


def test_it_is_set_up_once_and_as_the_first_call_would(monkeypatch):
    from transformers.utils import output_capturing

    first, batch = segformer()
    other, _ = segformer()
    first(**batch)
    assert set_up(other, f"{output_capturing.__file__}:1 in install")
    assert hooks(other) == hooks(first)
    assert sum(hooks(other).values())
    assert not set_up(other, f"{output_capturing.__file__}:1 in install")
    assert hooks(other) == hooks(first)


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x):
        with self.lock:
            return self.layer(x).sum()


def test_another_lock_is_a_graph_break_as_before():
    model = Locked()
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering="eager", strict=True
    )
    with pytest.raises(StrictError, match="lock"):
        engine.step(torch.ones(2, 4))
    assert not set_up(model, None) and not set_up(model, "forward.py:1")
