"""``plan="auto"`` computes what plain PyTorch computes, whatever the device makes it decide."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from stepgraph.equivalence.check import check_model
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.runtime.ranks import parse_mesh
from tests.equivalence.random_programs import Case, cases, check_case
from tests.equivalence.random_programs import run_case as run_plan
from tests.placement.planned import TOYS, toys  # noqa: F401
from tests.placement.solver.test_automatic import chain, convolutional, gpt2, llama
from tests.sampling import sampled
from tests.support import adamw

PROFILE = {} if os.environ.get("STEPGRAPH_HYPOTHESIS") else {
    "max_examples": 8, "phases": [Phase.explicit, Phase.generate]
}  # fmt: skip


def auto(mesh: str, device: str) -> Plan:
    return preset_plan("auto", parse_mesh(mesh), device=device)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    ids = torch.randint(32, (8, 8))
    dropout = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = BertConfig(**sizes, **dropout, intermediate_size=32, max_position_embeddings=8)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    dropout = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "num_labels": 4}
    config = ViTConfig(**sizes, **dropout, intermediate_size=32, image_size=8, patch_size=4)
    pixels, labels = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}


MODELS = {
    "chain": lambda: chain(8, 16, 8), "conv": lambda: convolutional(2), "llama": lambda: llama(2),
    "gpt2": lambda: gpt2(2), "bert": bert, "vit": vit,
}  # fmt: skip


MESHES = ["dp=2", "dp=2,tp=2", "dp=2,tp=4", "replicate=2,shard=2,tp=2"]


@pytest.mark.parametrize(
    ("name", "mesh", "device"),
    sampled(list(product(["chain"], MESHES, TOYS)), every=5)
    + [
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in product([name for name in MODELS if name != "chain"], MESHES, TOYS)
    ],
)
def test_every_pass_keeps_every_result(name, mesh, device, toys):  # noqa: F811
    model, batch = MODELS[name]()
    report = check_model(
        model,
        entries=("step",),
        optimizer=adamw(model),
        batch=batch,
        mesh=mesh,
        plan=auto(mesh, device),
        max_grad_norm=1.0,
    )
    assert report.ok, str(report)


class Conv(nn.Module):
    """Its small gathers are merged, one flat one behind the other."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
        )  # fmt: skip

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


@pytest.mark.slow
def test_flat_collectives_that_read_each_other_are_merged(toys):  # noqa: F811
    torch.manual_seed(0)
    model, batch = Conv(), (torch.randn(8, 3, 8, 8), torch.randint(8, (8,)))
    mesh = "dp=2,tp=2"
    report = check_model(
        model,
        entries=("step",),
        optimizer=adamw(model),
        batch=batch,
        mesh=mesh,
        plan=auto(mesh, "slow math"),
    )
    assert report.ok, str(report)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], **PROFILE
)
@given(case=cases(), device=st.sampled_from(sorted(TOYS)))
def test_a_random_module_trains_as_in_plain_pytorch(case: Case, device, toys):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:

        def run_case(case, **changed):
            if not changed:
                changed = {"plan": auto(case.mesh, device)}
            return run_plan(case, **changed)

        patch.setattr("tests.equivalence.random_programs.run_case", run_case)
        patch.setattr("tests.equivalence.random_programs.check_products_are_divided", print)
        check_case(case)
