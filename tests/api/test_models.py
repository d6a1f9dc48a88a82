import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from stepgraph.api.models import (
    BUILT_IN,
    build_model,
    find_model,
    language_model_loss,
    vocabulary_size,
)
from stepgraph.errors import UsageError

# As published: Llama 3 (arXiv 2407.21783), GPT-2, Qwen3.
PARAMETERS = {
    "llama-tiny": 1_820_352,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "qwen3-0.6b": 596_049_920,
}
LAYERS = {
    "llama-tiny": 4,
    "llama3-8b": 32,
    "llama3-70b": 80,
    "llama3-405b": 126,
    "gpt2": 12,
    "qwen3-0.6b": 28,
}


class Linear(nn.Module):
    """Logits from one table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, input_ids):
        return self.table(input_ids)


def make_linear():
    return Linear()


def make_nothing():
    return "a model"


def test_every_built_in_model_has_its_published_size():
    assert set(BUILT_IN) == set(PARAMETERS)
    for name in BUILT_IN:
        with torch.device("meta"):
            model = find_model(name)()
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name], name
        assert model.config.num_hidden_layers == LAYERS[name]


@pytest.mark.parametrize(
    ("name", "theta"), [("llama3-8b", 5e5), ("llama3-405b", 5e5), ("qwen3-0.6b", 1e6)]
)
def test_rotary_frequencies_are_the_published_ones(name, theta):
    with torch.device("meta"):
        config = find_model(name)().config
    settings = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert settings["rope_theta"] == theta
    if name == "llama3-405b":
        assert settings["rope_type"] == "llama3"
        assert settings["factor"] == 8.0


def test_a_built_in_model_keeps_its_dropout():
    with torch.device("meta"):
        model = find_model("gpt2")()
    assert model.training
    assert model.config.attn_pdrop == 0.1


def test_a_seed_gives_the_same_values_and_leaves_the_generator_alone():
    before = torch.random.get_rng_state()
    one, two, other = (build_model("llama-tiny", seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_config_file_is_a_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BUILT_IN["llama-tiny"], "num_hidden_layers": 1}))
    for name in (str(path), str(tmp_path)):
        model = build_model(name, 0)
        assert model.config.num_hidden_layers == 1
        assert vocabulary_size(model, otherwise=0) == 256


def test_a_factory_is_a_model(monkeypatch):
    model = build_model(f"{__name__}:make_linear", 0)
    assert isinstance(model, Linear)
    assert vocabulary_size(model, otherwise=7) == 7


def test_the_working_directory_is_searched_for_factories(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("from torch.nn import Identity as make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(build_model("my_models:make", 0), nn.Identity)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-tinny", "did you mean 'llama-tiny'"),
        ("nowhere/config.json", "there is no model config"),
        ("no_such_package:make", "cannot import 'no_such_package'"),
        (":make", "does not name a module"),
        (f"{__name__}:make_linea", "did you mean 'make_linear'"),
    ],
)
def test_an_unknown_model_is_bad_usage_before_anything_is_built(name, message):
    with pytest.raises(UsageError, match=message):
        find_model(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no 'model_type'"),
        ('{"hidden_size": 3}', "no 'model_type'"),
        ('{"model_type": "no-such-model"}', "cannot build"),
    ],
)
def test_a_malformed_config_is_bad_usage(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        build_model(str(path), 0)


def test_a_factory_must_return_a_module():
    with pytest.raises(UsageError, match="returned a str"):
        build_model(f"{__name__}:make_nothing", 0)


def test_logits_get_the_loss_that_transformers_computes():
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model = build_model("llama-tiny", 0)

    class OnlyLogits(nn.Module):
        def forward(self, input_ids):
            return model(input_ids=input_ids)

    torch.testing.assert_close(
        language_model_loss(OnlyLogits(), batch), language_model_loss(model, batch)
    )


def test_transformers_is_imported_only_for_a_model():
    program = "import sys, stepgraph.cli.main; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr
