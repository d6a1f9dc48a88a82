"""What MODEL means on the command line: a built-in name, a ``config.json``, or a function's name.

Sizes of the built-in models are those of their publishers' ``config.json``. transformers is
imported only when one of them is built.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.errors import UsageError, near_misses
from stepgraph.program.driver import no_collections


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        **more,
    }


BUILT_IN: dict[str, dict[str, Any]] = {
    # Bytes as tokens; small enough for two cores to train in minutes.
    "llama-tiny": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "llama3-8b": _llama3(hidden=4096, intermediate=14336, layers=32, heads=32),
    "llama3-70b": _llama3(hidden=8192, intermediate=28672, layers=80, heads=64),
    "llama3-405b": _llama3(  # exists as Llama 3.1 only, with its longer context
        hidden=16384,
        intermediate=53248,
        layers=126,
        heads=128,
        max_position_embeddings=131072,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}


def find_model(name: str) -> Callable[[], nn.Module]:
    """What makes the model of a name; nothing is built yet, so that a bad name fails at once.

    Returns:
        a function without arguments: a module in training mode, on torch's default device
        (``with torch.device("meta")`` works).

    Raises:
        UsageError: unknown name, missing or malformed file, no such module or function.
    """
    if name in BUILT_IN:
        return lambda: _from_config(BUILT_IN[name])
    if name.endswith(".json") or Path(name).is_dir():
        config = _read_config(Path(name))
        return lambda: _from_config(config)
    if ":" in name:
        return _find_factory(name)
    raise UsageError(
        f"unknown model {name!r}",
        do=f"{near_misses(name, BUILT_IN)}; or a path to a config.json, or package.module:factory",
    )


def build_model(name: str, seed: int) -> nn.Module:
    """The model of a name, its values drawn from the seed."""
    make = find_model(name)
    with torch.random.fork_rng(devices=[]), no_collections():
        torch.manual_seed(seed)
        return make()


def vocabulary_size(model: nn.Module, otherwise: int) -> int:
    """How many token ids the model knows, where its config says so."""
    return getattr(getattr(model, "config", None), "vocab_size", None) or otherwise


def language_model_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy of the next token.

    Args:
        model: takes ``input_ids`` and ``labels`` and returns ``.loss``, as transformers' models do;
            or takes ``input_ids`` [batch, seq] alone and returns logits [batch, seq, vocabulary].
        batch: ``input_ids`` and ``labels``, int64 [batch, seq]; labels are not shifted.
    """
    if "labels" in inspect.signature(model.forward).parameters:
        return model(**batch).loss
    logits = model(batch["input_ids"])
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    )


def _from_config(config: dict[str, Any]) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            "this model is built by transformers, which is not installed",
            do="pip install 'stepgraph[hf]'",
        ) from error
    settings = dict(config)
    try:
        made = AutoConfig.for_model(settings.pop("model_type"), **settings)
        made.use_cache = False  # generation only; a training step would return it
        return AutoModelForCausalLM.from_config(made)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"transformers cannot build the model: {error}", do="check the config's values"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"there is no model config at {str(path)!r}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(
            f"{path} is not a transformers config: it has no 'model_type'",
            do="give the config.json of a transformers model",
        )
    return config


def _find_factory(name: str) -> Callable[[], nn.Module]:
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # the console script does not look here
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name!r} of model {name!r}: {error}") from error
    except ValueError as error:  # an empty name
        raise UsageError(f"model {name!r} does not name a module") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise UsageError(
            f"module {module_name!r} has no function {attribute!r}",
            do=near_misses(attribute, public),
        )

    def make() -> nn.Module:
        model = factory()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{name} returned a {type(model).__name__}, not an nn.Module")
        return model

    return make
