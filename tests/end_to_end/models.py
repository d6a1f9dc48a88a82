"""Models as people bring them: random weights, a few thousand parameters, dropout where they have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS, TOKENS, WORDS = 4, 8, 64
WIDTH = 16


@dataclass(frozen=True)
class Brought:
    """A model, a batch of :data:`ROWS` rows for it, and its loss (None: its own)."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None


def _text(**extra: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    labels = ids.clone()
    labels[0, : TOKENS // 2] = -100
    return {"input_ids": ids, "labels": labels, **extra}


def llama() -> Brought:
    """Grouped-query attention, rotary positions, RMS norm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, attention_dropout=0.1,
    )  # fmt: skip
    return Brought(LlamaForCausalLM(config), _text())


def qwen3() -> Brought:
    """Norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=WORDS, attention_dropout=0.1,
    )  # fmt: skip
    return Brought(Qwen3ForCausalLM(config), _text())


def gpt2() -> Brought:
    """Queries, keys and values in one product; tied embeddings; dropout everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=TOKENS)
    return Brought(GPT2LMHeadModel(config), _text())


def bert() -> Brought:
    """A masked language model, padded, dropout everywhere."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=WORDS, max_position_embeddings=TOKENS,
    )  # fmt: skip
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, TOKENS - 3 :] = 0
    return Brought(BertForMaskedLM(config), _text(attention_mask=mask))


def vit() -> Brought:
    """Image patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.1,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.randint(0, 5, (ROWS,))}
    return Brought(ViTForImageClassification(config), batch)


def mixtral() -> Brought:
    """A mixture of experts, every expert on every token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return Brought(MixtralForCausalLM(config), _text())


def whisper() -> Brought:
    """An encoder of spectrograms and a decoder that attends to it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=WORDS,
        num_mel_bins=8, max_source_positions=8, max_target_positions=TOKENS, dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {
        "input_features": torch.randn(ROWS, 8, 16),
        "labels": torch.randint(3, WORDS, (ROWS, TOKENS)),
    }
    return Brought(WhisperForConditionalGeneration(config), batch)


class _Block(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.time = nn.Linear(8, out)
        self.second = nn.Sequential(
            nn.GroupNorm(2, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return self.second(y) + self.skip(x)


class UNet(nn.Module):
    """Noise in, noise out: down, attention, up, with skips; as diffusion models are built."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.middle, self.up = _Block(8, 8), _Block(8, 16), _Block(24, 8)
        self.smaller = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None] * torch.arange(1, 5, device=time.device) / 10
        time = torch.cat([angles.sin(), angles.cos()], 1)
        kept = self.down(self.enter(x), time)
        y = self.middle(self.smaller(kept), time)
        tokens = y.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        y = tokens.transpose(1, 2).reshape(y.shape)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.leave(self.up(torch.cat([y, kept], 1), time))


def unet() -> Brought:
    """A diffusion step: the noise that was added is predicted."""
    batch = {
        "x": torch.randn(ROWS, 3, 8, 8),
        "time": torch.rand(ROWS),
        "noise": torch.randn(ROWS, 3, 8, 8),
    }
    return Brought(
        UNet(), batch, lambda m, b: F.mse_loss(m(b["x"] + b["noise"], b["time"]), b["noise"])
    )


def convolutional() -> Brought:
    """Convolutions and batch norm, pooled, with a residual branch."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x + self.body(x))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(8, 5),
    )  # fmt: skip
    batch = {"x": torch.randn(ROWS, 3, 16, 16), "y": torch.randint(0, 5, (ROWS,))}
    return Brought(model, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))


def lora() -> Brought:
    """A Llama whose base is frozen, and adapters that learn."""
    from peft import LoraConfig, get_peft_model

    base = llama()
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = get_peft_model(base.model, config)
    with torch.no_grad():  # B starts at zero, and then A gets no gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return Brought(model, base.batch)


MODELS = {
    make.__name__: make
    for make in (llama, qwen3, gpt2, bert, vit, mixtral, whisper, unet, convolutional, lora)
}


def bring(name: str, dropout: bool = True) -> Brought:
    """A model in training mode, the same at every call; ``dropout=False``: every probability is zero."""
    torch.manual_seed(0)
    brought = MODELS[name]()
    brought.model.train()
    if not dropout:
        without_dropout(brought.model)
    return brought


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model; every probability in it is zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model
