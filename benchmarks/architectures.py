"""Unmodified models of transformers, trained on meshes that are not there, beside plain PyTorch.

    python benchmarks/architectures.py --json benchmarks/results/architectures.json [--only swin,t5]

Each architecture from its config, with a few thousand random parameters and without dropout: two steps of
SGD with momentum in plain PyTorch on the whole batch, and on all ranks in one process under ``zero3`` on
two, ``tp`` on two and ``tp+sp+zero3`` on four. The largest difference of losses, relative, and of
parameters, of their largest entry where that is above one. Where either is more than float32 explains in a
well-conditioned model (2e-5), everything is done again in float64: what is off by less than 1e-8 there was
rounding. A model that cannot be captured whole says where, and why.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tests.one_process import OneProcessRun
from torch import nn

from stepgraph.errors import GraphBreakError

ROWS, TOKENS, WORDS, WIDTH, STEPS = 4, 8, 64, 16, 2
CELLS = (("zero3", "dp=2"), ("tp", "tp=2"), ("tp+sp+zero3", "dp=2,tp=2"))
SINGLE, DOUBLE = 2e-5, 1e-8
Batch = dict[str, Any]

# -- batches


def words(length: int = TOKENS) -> torch.Tensor:
    """Token ids above those that mean something."""
    return torch.randint(6, WORDS, (ROWS, length))


def classes(*shape: int) -> torch.Tensor:
    """One of three classes for each."""
    return torch.randint(0, 3, (ROWS, *shape))


def text(mask: bool = False) -> Batch:
    """A language model's, some labels of the first row ignored."""
    ids = words()
    labels = ids.clone()
    labels[0, : TOKENS // 2] = -100
    masked = {"attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.long)} if mask else {}
    return {"input_ids": ids, "labels": labels, **masked}


def translated() -> Batch:
    """An encoder's and a decoder's."""
    return {"input_ids": words(), "labels": words(6)}


def answered() -> Batch:
    """Where an answer begins and ends."""
    places = torch.randint(0, TOKENS, (2, ROWS))
    return {"input_ids": words(), "start_positions": places[0], "end_positions": places[1]}


def pixels(size: int = 32, *frames: int) -> torch.Tensor:
    """Images, or films of some frames."""
    return torch.randn(ROWS, *frames, 3, size, size)


def image(size: int = 32, *frames: int, each_pixel: bool = False) -> Batch:
    """An image's class, or each pixel's."""
    labels = classes(size, size) if each_pixel else classes()
    return {"pixel_values": pixels(size, *frames), "labels": labels}


def pictured(size: int = 32, token: int | None = None) -> Batch:
    """A text about an image, which ``token`` stands for."""
    ids = words() if token is None else torch.cat([torch.full((ROWS, 4), token), words(6)], 1)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels(size)}


def seen(**more: Any) -> Batch:
    """Words, and images beside them."""
    return {"input_ids": words(), "pixel_values": pixels(), **more}


def sound() -> Batch:
    """A wave's class."""
    return {"input_values": torch.randn(ROWS, 400), "labels": classes()}


def series() -> Batch:
    """Values, what they are about, and those to come."""
    return {
        "past_values": torch.rand(ROWS, 10), "past_time_features": torch.randn(ROWS, 10, 1),
        "past_observed_mask": torch.ones(ROWS, 10), "future_values": torch.rand(ROWS, 4),
        "future_time_features": torch.randn(ROWS, 4, 1),
    }  # fmt: skip


def forecast() -> Batch:
    """Two channels, and what they go on with."""
    return {"past_values": torch.randn(ROWS, 16, 2), "future_values": torch.randn(ROWS, 4, 2)}


masked = partial(text, mask=True)
tagged: Callable[[], Batch] = lambda: {"input_ids": words(), "labels": classes(TOKENS)}  # noqa: E731
sorted_in: Callable[[], Batch] = lambda: {"input_ids": words(), "labels": classes()}  # noqa: E731

# -- sizes

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**BLOCKS, **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GPT = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": WORDS,
    "n_positions": 32,
    **SPECIAL,
}
PAIR = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": WORDS,
    "max_position_embeddings": 32, "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
PATCHES = {**BLOCKS, "image_size": 32, "patch_size": 8}
IMAGE = {**PATCHES, "num_labels": 3}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
WINDOWS = {
    "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "image_size": 32,
    "patch_size": 4, "num_labels": 3,
}  # fmt: skip
WAVE = {
    **BLOCKS, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_labels": 3,
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8, "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 8, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "lags_sequence": [1, 2], "num_time_features": 1,
}  # fmt: skip
CHANNELS = {
    "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
    "num_input_channels": 2, "loss": "mse",
}  # fmt: skip
TWO = {
    "text_config": {**TEXT, "max_position_embeddings": 16}, "vision_config": PATCHES, "projection_dim": 8,
}  # fmt: skip

Made = tuple[str, dict[str, Any], Callable[[], Batch]]
MODELS: dict[str, Made] = {
    # Decoders of text.
    "arcee": ("ArceeForCausalLM", HEADS, text),
    "bloom": ("BloomForCausalLM", {**SPECIAL, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4,
              "vocab_size": WORDS}, text),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, text),
    "cohere": ("CohereForCausalLM", HEADS, text),
    "diffllama": ("DiffLlamaForCausalLM", HEADS, text),
    "ernie4_5": ("Ernie4_5ForCausalLM", HEADS, text),
    "exaone4": ("Exaone4ForCausalLM", {**HEADS, "sliding_window": 4}, text),
    "falcon": ("FalconForCausalLM", {**TEXT, "multi_query": True}, text),
    "gemma": ("GemmaForCausalLM", HEADS, text),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, "sliding_window": 4, "query_pre_attn_scalar": 4}, text),
    "gemma3": ("Gemma3ForCausalLM", {**HEADS, "sliding_window": 4, "query_pre_attn_scalar": 4}, text),
    "glm4": ("Glm4ForCausalLM", {**HEADS, "partial_rotary_factor": 0.5}, text),
    "gpt2": ("GPT2LMHeadModel", GPT, text),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, text),
    "gpt_neo": ("GPTNeoForCausalLM", {**TEXT, "num_layers": 2, "num_heads": 4, "window_size": 4,
                "attention_types": [[["global", "local"], 1]]}, text),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT, text),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, text),
    "granite": ("GraniteForCausalLM", GROUPED, text),
    "helium": ("HeliumForCausalLM", HEADS, text),
    "llama": ("LlamaForCausalLM", GROUPED, text),
    "mistral": ("MistralForCausalLM", {**HEADS, "sliding_window": 4}, text),
    "mpt": ("MptForCausalLM", {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 32,
            "vocab_size": WORDS, "expansion_ratio": 2}, text),
    "nemotron": ("NemotronForCausalLM", HEADS, text),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, text),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": WIDTH}, text),
    "persimmon": ("PersimmonForCausalLM", TEXT, text),
    "phi": ("PhiForCausalLM", {**TEXT, "partial_rotary_factor": 0.5}, text),
    "phi3": ("Phi3ForCausalLM", HEADS, text),
    "qwen3": ("Qwen3ForCausalLM", HEADS, text),
    "smollm3": ("SmolLM3ForCausalLM", HEADS, text),
    "stablelm": ("StableLmForCausalLM", GROUPED, text),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED, text),
    # With experts.
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 8,
                    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 4, "v_head_dim": 4, "n_shared_experts": 1}, text),
    "gpt_oss": ("GptOssForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 4}, text),
    "jetmoe": ("JetMoeForCausalLM", {**GROUPED, "kv_channels": 4, "num_local_experts": 4,
               "num_experts_per_tok": 2}, text),
    "mixtral": ("MixtralForCausalLM", {**HEADS, "num_local_experts": 4}, text),
    "olmoe": ("OlmoeForCausalLM", {**TEXT, **EXPERTS, "num_key_value_heads": 4}, text),
    "phimoe": ("PhimoeForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**HEADS, **EXPERTS, "moe_intermediate_size": 8,
                  "shared_expert_intermediate_size": 8}, text),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**HEADS, **EXPERTS, "moe_intermediate_size": 8}, text),
    # Recurrent, and in part.
    "bamba": ("BambaForCausalLM", {**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_state": 4,
              "mamba_n_groups": 1, "mamba_chunk_size": 4, "attn_layer_indices": [1]}, text),
    "falcon_mamba": ("FalconMambaForCausalLM", {**TEXT, "state_size": 4, "time_step_rank": 4}, text),
    "jamba": ("JambaForCausalLM", {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
              "num_experts_per_tok": 1,
              "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, text),
    "lfm2": ("Lfm2ForCausalLM", {**GROUPED, "full_attn_idxs": [1], "block_multiple_of": 8}, text),
    "mamba": ("MambaForCausalLM", {**TEXT, "state_size": 4, "time_step_rank": 4}, text),
    "mamba2": ("Mamba2ForCausalLM", {**SPECIAL, "hidden_size": WIDTH, "num_hidden_layers": 2,
               "vocab_size": WORDS, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1,
               "chunk_size": 4}, text),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {**GROUPED, "num_hidden_layers": 3, "lru_width": WIDTH,
                        "attention_window_size": 8}, text),
    # Encoders of text.
    "albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 8}, masked),
    "bert": ("BertForTokenClassification", {**TEXT, "num_labels": 3}, tagged),
    "bigbird": ("BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}, masked),
    "convbert": ("ConvBertForMaskedLM", {**TEXT, "embedding_size": WIDTH, "head_ratio": 2,
                 "conv_kernel_size": 3}, masked),
    "deberta_v2": ("DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True, "position_buckets": 8,
                   "pos_att_type": ["p2c", "c2p"]}, masked),
    "distilbert": ("DistilBertForMaskedLM", {"dim": WIDTH, "hidden_dim": 24, "n_layers": 2, "n_heads": 4,
                   "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}, masked),
    "electra": ("ElectraForQuestionAnswering", {**TEXT, "embedding_size": WIDTH}, answered),
    "esm": ("EsmForMaskedLM", {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 4}, masked),
    "fnet": ("FNetForMaskedLM", TEXT, text),
    "funnel": ("FunnelForMaskedLM", {"d_model": WIDTH, "n_head": 4, "d_head": 4, "d_inner": 24,
               "vocab_size": WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1}, masked),
    "layoutlm": ("LayoutLMForTokenClassification", {**TEXT, "num_labels": 3,
                 "max_2d_position_embeddings": 64},
                 lambda: {**tagged(), "bbox": torch.tensor([1, 2, 5, 9]).repeat(ROWS, TOKENS, 1)}),
    "longformer": ("LongformerForMaskedLM", {**TEXT, "attention_window": 4}, masked),
    "luke": ("LukeForMaskedLM", {**TEXT, "entity_vocab_size": 10, "entity_emb_size": 8}, masked),
    "megatron_bert": ("MegatronBertForMaskedLM", TEXT, masked),
    "mobilebert": ("MobileBertForMaskedLM", {**TEXT, "embedding_size": WIDTH, "intra_bottleneck_size": 8,
                   "true_hidden_size": 8}, masked),
    "modernbert": ("ModernBertForMaskedLM", {**TEXT, "local_attention": 4,
                   "global_attn_every_n_layers": 2}, masked),
    "mpnet": ("MPNetForMaskedLM", TEXT, masked),
    "rembert": ("RemBertForMaskedLM", {**TEXT, "input_embedding_size": 8,
                "output_embedding_size": 8}, masked),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "num_labels": 3}, sorted_in),
    "roformer": ("RoFormerForMaskedLM", {**TEXT, "embedding_size": WIDTH}, masked),
    "squeezebert": ("SqueezeBertForMaskedLM", {**TEXT, "embedding_size": WIDTH, "q_groups": 2,
                    "k_groups": 2,
                    "v_groups": 2, "post_attention_groups": 1, "intermediate_groups": 2,
                    "output_groups": 2}, masked),
    "xlm_roberta": ("XLMRobertaForMaskedLM", TEXT, masked),
    "xlnet": ("XLNetLMHeadModel", {"d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 24,
              "vocab_size": WORDS}, text),
    # Encoders with a decoder.
    "bart": ("BartForConditionalGeneration", {**PAIR, "forced_eos_token_id": 2}, translated),
    "led": ("LEDForConditionalGeneration", {**PAIR, "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32, "attention_window": 4}, translated),
    "m2m_100": ("M2M100ForConditionalGeneration", PAIR, translated),
    "marian": ("MarianMTModel", PAIR, translated),
    "pegasus": ("PegasusForConditionalGeneration", PAIR, translated),
    "t5": ("T5ForConditionalGeneration", {"d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 1,
           "num_heads": 4, "vocab_size": WORDS, "decoder_start_token_id": 0, "pad_token_id": 0},
           translated),
    # Images and films.
    "beit": ("BeitForImageClassification", {**IMAGE, "use_relative_position_bias": True,
             "layer_scale_init_value": 0.1}, image),
    "convnext": ("ConvNextForImageClassification", {**STAGES, "num_stages": 2}, image),
    "convnextv2": ("ConvNextV2ForImageClassification", {**STAGES, "num_stages": 2}, image),
    "deit": ("DeiTForImageClassification", IMAGE, image),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}, image),
    "dpt": ("DPTForSemanticSegmentation", {**IMAGE, "num_hidden_layers": 4, "is_hybrid": False,
            "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8,
            "reassemble_factors": [4, 2, 1, 0.5]}, partial(image, each_pixel=True)),
    "focalnet": ("FocalNetForImageClassification", {"embed_dim": 8, "depths": [1, 1], "image_size": 32,
                 "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": 3}, image),
    "ijepa": ("IJepaForImageClassification", IMAGE, image),
    "levit": ("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [8, 16, 24],
              "num_attention_heads": [2] * 3, "depths": [1] * 3, "key_dim": [4] * 3, "num_labels": 3},
              partial(image, 64)),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 64,
                     "num_labels": 3}, partial(image, 64)),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32,
                     "num_labels": 3}, image),
    "mobilevit": ("MobileViTForImageClassification", {"hidden_sizes": [16] * 3, "num_labels": 3,
                  "neck_hidden_sizes": [8] * 6 + [16], "num_attention_heads": 2, "image_size": 64},
                  partial(image, 64)),
    "poolformer": ("PoolFormerForImageClassification", {**STAGES, "num_encoder_blocks": 2,
                   "padding": [2, 1],
                   "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratio": 2.0}, image),
    "pvt_v2": ("PvtV2ForImageClassification", {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4,
               "num_attention_heads": [1, 2, 2, 2], "sr_ratios": [2, 2, 1, 1], "mlp_ratios": [2] * 4,
               "image_size": 32, "num_labels": 3}, partial(image, 64)),
    "regnet": ("RegNetForImageClassification", {**STAGES, "embedding_size": 8, "groups_width": 4}, image),
    "resnet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 8,
               "layer_type": "basic"}, image),
    "segformer": ("SegformerForSemanticSegmentation", {**STAGES, "num_encoder_blocks": 2,
                  "sr_ratios": [2, 1],
                  "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
                  "mlp_ratios": [2, 2], "decoder_hidden_size": 16}, partial(image, each_pixel=True)),
    "swin": ("SwinForImageClassification", WINDOWS, image),
    "swinv2": ("Swinv2ForImageClassification", WINDOWS, image),
    "timesformer": ("TimesformerForVideoClassification", {**IMAGE, "num_frames": 2}, partial(image, 32, 2)),
    "videomae": ("VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4, "tubelet_size": 2},
                 partial(image, 32, 4)),
    "vit": ("ViTForImageClassification", IMAGE, image),
    "vit_mae": ("ViTMAEForPreTraining", {**IMAGE, "decoder_hidden_size": 16,
                "decoder_intermediate_size": 24,
                "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "mask_ratio": 0.5},
                lambda: {"pixel_values": pixels(), "noise": torch.rand(ROWS, 16)}),
    # Texts with images.
    "blip": ("BlipForConditionalGeneration", {**TWO, "text_config": {**TWO["text_config"],
             "encoder_hidden_size": WIDTH}, "image_text_hidden_size": 8}, pictured),
    "clip": ("CLIPModel", TWO, partial(seen, return_loss=True)),
    "clipseg": ("CLIPSegForImageSegmentation", {**TWO, "reduce_dim": 8, "extract_layers": [0, 1],
                "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16},
                lambda: seen(labels=torch.rand(ROWS, 32, 32))),
    "git": ("GitForCausalLM", {**TEXT, "vision_config": PATCHES}, pictured),
    "llava": ("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **GROUPED},
              "vision_config": {"model_type": "clip_vision_model", **PATCHES, "image_size": 16},
              "image_token_index": 5}, partial(pictured, 16, token=5)),
    "siglip": ("SiglipModel", {**TWO, "text_config": {**TWO["text_config"], "projection_size": WIDTH}},
               partial(seen, return_loss=True)),
    "vilt": ("ViltForQuestionAnswering", {**IMAGE, "vocab_size": WORDS, "max_position_embeddings": 16,
             "max_image_length": -1},
             lambda: seen(labels=torch.rand(ROWS, 3))),
    # Sound, and values over time.
    "ast": ("ASTForAudioClassification", {**BLOCKS, "patch_size": 4, "max_length": 16, "num_mel_bins": 16,
            "frequency_stride": 4, "time_stride": 4, "num_labels": 3},
            lambda: {"input_values": torch.randn(ROWS, 16, 16), "labels": classes()}),
    "hubert": ("HubertForSequenceClassification", WAVE, sound),
    "informer": ("InformerForPrediction", {**SERIES, "attention_type": "full", "distil": False}, series),
    "patchtsmixer": ("PatchTSMixerForPrediction", {**CHANNELS, "d_model": 8, "num_layers": 1}, forecast),
    "patchtst": ("PatchTSTForPrediction", {**CHANNELS, "d_model": WIDTH, "num_hidden_layers": 1,
                 "num_attention_heads": 4, "ffn_dim": 24}, forecast),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {**PAIR, "num_conv_layers": 1,
                       "conv_kernel_sizes": [3], "conv_channels": 16, "input_feat_per_channel": 8,
                       "max_source_positions": 64, "max_target_positions": 32},
                       lambda: {"input_features": torch.randn(ROWS, 16, 8), "labels": words(6)}),
    "time_series": ("TimeSeriesTransformerForPrediction", SERIES, series),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", WAVE, sound),
}  # fmt: skip

# -- training


def without_dropout(config: Any) -> None:
    """Nor other noise; also in the configs inside of one."""
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, transformers.PretrainedConfig):
            without_dropout(value)


def bring(name: str, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    """A model in training mode, and its batch."""
    torch.manual_seed(0)
    kind, sizes, batch_of = MODELS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**copy.deepcopy(sizes))
    without_dropout(config)
    config.use_cache = False
    model = model_class(config).train().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # of a size that no config says
            module.p = 0.0
    batch = {
        key: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch_of().items()
    }
    return model, batch


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of what is learned."""
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )


def train(name: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Differences to plain PyTorch, by preset.

    Raises:
        GraphBreakError: the model cannot be captured whole.
    """
    model, batch = bring(name, dtype)
    runs, captured = {}, None
    for plan, mesh in CELLS:
        copied = copy.deepcopy(model)
        run = OneProcessRun(
            copied, optimizer=optimizer_of(copied), mesh=mesh, plan=plan, captured=captured
        )
        losses = [run.step(batch).item() for _ in range(STEPS)]
        captured, runs[plan] = run.captured, (losses, run.parameters())
    optimizer, expected = optimizer_of(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    wanted = {key: value.detach() for key, value in model.named_parameters() if value.numel()}
    return {
        plan: {
            "loss": max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
            "parameters": max(
                ((parameters[key] - value).abs().max() / max(1.0, value.abs().max())).item()
                for key, value in wanted.items()
                if key in parameters  # others are not read at all
            ),
        }
        for plan, (losses, parameters) in runs.items()
    }


def measure(name: str) -> dict[str, Any]:
    """One architecture."""
    start = time.perf_counter()
    row: dict[str, Any] = {"architecture": name, "class": MODELS[name][0]}
    try:
        row["float32"] = train(name, torch.float32)
        if largest(row["float32"]) > SINGLE:
            row["float64"] = train(name, torch.float64)
    except GraphBreakError as error:
        where = re.sub(r"^.*site-packages/", "", error.where or "")
        why = str(error.why or error.what).splitlines()[0]
        row["graph break"] = f"{where}: {why[:200]}"
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def largest(differences: dict[str, dict[str, float]]) -> float:
    """Of losses and parameters, under every preset."""
    return max(value for one in differences.values() for value in one.values())


def verdict(row: dict[str, Any]) -> str:
    """``as plain PyTorch``, ``graph by graph``, or ``off``."""
    if "graph break" in row:
        return "graph by graph"
    equal = largest(row["float32"]) <= SINGLE
    return "as plain PyTorch" if equal or largest(row["float64"]) <= DOUBLE else "off"


def main() -> None:
    """Measures all that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in options.only.split(","):
        row = measure(name)
        row["verdict"] = verdict(row)
        known = {t: f"{largest(row[t]):.0e}" for t in ("float32", "float64") if t in row}
        print(f"{name:16} {row['verdict']:16} {known or row['graph break']}", flush=True)
        rows.append(row)
    counts = {
        said: sum(row["verdict"] == said for row in rows) for said in {r["verdict"] for r in rows}
    }
    print(counts)
    if options.json:
        found = {"transformers": transformers.__version__, "torch": torch.__version__}
        options.json.write_text(
            json.dumps({**found, "counts": counts, "models": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
