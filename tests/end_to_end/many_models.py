"""Architectures of transformers, a few thousand random weights each: one table entry each.

(class of the model, class of its configuration, numbers, batch); dropout is off, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORDS, ROWS, TOKENS = 97, 4, 16

_BASE = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
_HALF = _BASE | {"num_key_value_heads": 2}
_HEADS = _HALF | {"head_dim": 8}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SHORT = {"max_position_embeddings": 64}
_SMALL = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2}
_GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}
_NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
_EXPERTS = {"num_experts_per_tok": 2}


def _ids() -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, TOKENS))


def _text() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.clone()}


def _labelled(labels: torch.Tensor) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": _ids(), "labels": labels}


def _images(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.arange(ROWS)}


_CAUSAL: dict[str, dict[str, Any]] = {
    "Gemma": _HEADS,
    "Gemma2": _HEADS,
    "Mistral": _HALF | {"sliding_window": 8},
    "Phi": _BASE,
    "Phi3": _BASE | {"pad_token_id": 0},
    "Olmo2": _BASE,
    "Cohere": _BASE,
    "Starcoder2": _HALF
    | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "GPTNeoX": _BASE,
    "OPT": _SMALL | _SHORT | {
        "word_embed_proj_dim": 32, "num_attention_heads": 4, "ffn_dim": 64, "dropout": 0.0,
    },
    "Bloom": {
        "vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "Falcon": _SMALL | {"num_attention_heads": 4, "alibi": False},
    "GPTJ": _GPT | _NO_PDROP | {"rotary_dim": 4},
    "GPTNeo": _SHORT | {
        "vocab_size": WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0, "embed_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "Mamba": _SMALL | {"state_size": 4},
    "Mamba2": _SMALL
    | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "DeepseekV3": _BASE | _EXPERTS | {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    },
    "Qwen3Moe": _HEADS | _EXPERTS | {"moe_intermediate_size": 16, "num_experts": 4},
    "GptOss": _HEADS | _EXPERTS | {"num_local_experts": 4},
    "Rwkv": _SMALL | {"context_length": 64},
    "XGLM": _NO_DROPOUT
    | {"vocab_size": WORDS, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "StableLm": _BASE | {"num_key_value_heads": 4},
    "Mpt": {"vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    "CodeGen": _GPT | _NO_PDROP | {"rotary_dim": 4},
    "Granite": _BASE,
    "Nemotron": _HEADS,
    "Jamba": _HALF | {"num_experts": 4, "mamba_d_state": 4, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "RecurrentGemma": _HALF
    | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
}  # fmt: skip

_TOWER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip

# Model class -> (configuration class, numbers, batch).
_OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "T5ForConditionalGeneration": ("T5Config", {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }, _text),
    "BartForConditionalGeneration": ("BartConfig", _SHORT | {
        "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "dropout": 0.0,
    }, _text),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", _BASE | _QUIET | _SHORT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    }, _text),
    "AlbertForMaskedLM": ("AlbertConfig", _BASE | _QUIET | _SHORT | {
        "embedding_size": 16, "classifier_dropout_prob": 0.0,
    }, _text),
    "DistilBertForSequenceClassification": ("DistilBertConfig", _NO_DROPOUT | {
        "vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
        "seq_classif_dropout": 0.0,
    }, _labelled(torch.tensor([0, 1, 1, 0]))),
    "RobertaForQuestionAnswering": ("RobertaConfig", _BASE | _QUIET | _SHORT, lambda: {
        "input_ids": _ids(), "start_positions": torch.arange(ROWS),
        "end_positions": torch.arange(ROWS) + 4,
    }),
    "ElectraForTokenClassification": (
        "ElectraConfig", _BASE | _QUIET | _SHORT | {"embedding_size": 16},
        _labelled(torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 2),
    ),
    "XLNetLMHeadModel": ("XLNetConfig", {
        "vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0,
    }, _text),
    "SwinForImageClassification": ("SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "drop_path_rate": 0.0, "num_labels": 5,
    }, _images),
    "ConvNextForImageClassification": ("ConvNextConfig", {
        "image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2,
        "num_labels": 5, "patch_size": 2,
    }, _images),
    "CLIPModel": ("CLIPConfig", {
        "text_config": _TOWER
        | {"vocab_size": WORDS, "max_position_embeddings": 32, "eos_token_id": 2},
        "vision_config": _TOWER | {"image_size": 32, "patch_size": 8}, "projection_dim": 16,
    }, lambda: {
        "input_ids": _ids(), "pixel_values": _images()["pixel_values"], "return_loss": True,
    }),
    "ViTMAEForPreTraining": ("ViTMAEConfig", _TOWER | _QUIET | {
        "image_size": 32, "patch_size": 8, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64,
    }, lambda: {"pixel_values": _images()["pixel_values"], "noise": torch.rand(ROWS, 16)}),
    "ResNetForImageClassification": ("ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "num_labels": 5,
    }, _images),
    "FNetForMaskedLM": ("FNetConfig", _SHORT | _SMALL | {
        "intermediate_size": 64, "hidden_dropout_prob": 0.0,
    }, _text),
    "PatchTSTForPrediction": ("PatchTSTConfig", {
        "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8,
        "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
        "prediction_length": 4, "attention_dropout": 0.0, "positional_dropout": 0.0,
        "ff_dropout": 0.0, "path_dropout": 0.0, "head_dropout": 0.0,
    }, lambda: {
        "past_values": torch.randn(ROWS, 32, 2), "future_values": torch.randn(ROWS, 4, 2),
    }),
    "FunnelForMaskedLM": ("FunnelConfig", {
        "vocab_size": WORDS, "d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8,
        "d_inner": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }, _text),
    "PerceiverForMaskedLM": ("PerceiverConfig", {
        "num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4, "attention_probs_dropout_prob": 0.0, "vocab_size": WORDS,
        "max_position_embeddings": TOKENS,
    }, lambda: {
        "inputs": _ids(), "labels": _ids(),
        "attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.long),
    }),
}  # fmt: skip

ARCHITECTURES = [*_CAUSAL, *_OTHERS]


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode, and a batch for it."""
    import transformers

    torch.manual_seed(0)
    if name in _CAUSAL:
        config = getattr(transformers, f"{name}Config")(**_CAUSAL[name])
        model = transformers.AutoModelForCausalLM.from_config(config)
        return model.train(), _text()
    kind, numbers, batch = _OTHERS[name]
    model = getattr(transformers, name)(getattr(transformers, kind)(**numbers))
    return model.train(), batch()
