"""Policies for parts of a model, by the paths of their modules."""

import pytest
import torch
from torch import nn

from stepgraph.capture.module import BatchSpec, default_loss
from stepgraph.capture.step import Source
from stepgraph.errors import UsageError
from stepgraph.memory.decide import decide
from stepgraph.memory.patterns import as_text, parse_patterns
from stepgraph.memory.presets import parse_policy
from stepgraph.pipeline import capture_of
from stepgraph.planning.request import StepSettings
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD
from stepgraph.torch_internals import pytree
from tests.support import adamw, captured, spec_of, tiny_llama, token_batch


@pytest.fixture(scope="module")
def program():
    return captured(tiny_llama(3), token_batch(2))


def modules(program, decision):
    names = {meta(node)["name"]: meta(node)["module"] for node in program.operations(FORWARD)}
    return {names[name] for name in decision.recompute}


def test_a_table_is_a_text_and_back():
    table = {"layers.*.mlp": "recompute", "*.self_attn": "save"}
    text = as_text(table)
    assert text == "layers.*.mlp=recompute,*.self_attn=save"
    assert parse_patterns(text) == table
    assert parse_policy(text) == (text, 0)
    assert as_text({}) == "none"
    assert as_text("full") == "full"


@pytest.mark.parametrize(
    "text", ["layers.*=drop", "=recompute", "a=recompute,a=save", "a=recompute,", "=offload"]
)
def test_what_is_no_pattern_is_an_error(text):
    with pytest.raises(UsageError, match="memory pattern .* cannot be used"):
        parse_policy(text)


def test_a_comma_names_no_module():
    with pytest.raises(UsageError, match="comma"):
        as_text({"a,b": "save"})


def test_only_the_modules_that_are_named_are_recomputed(program):
    decision = decide(program, "layers.*.mlp=recompute")
    found = modules(program, decision)
    assert found
    assert all(".mlp" in path for path in found)
    assert {path.split(".mlp")[0] for path in found} == {f"model.layers.{i}" for i in range(3)}
    assert len(set(decision.recompute.values())) == 3  # each a region of its own


def test_one_layer_is_not_another_that_begins_alike(program):
    found = modules(program, decide(program, "layers.1=recompute"))
    assert found and all("layers.1." in f"{path}." for path in found)


def test_what_is_saved_stays_within_what_is_recomputed(program):
    whole = decide(program, "model.layers.*=recompute")
    part = decide(program, "*.self_attn=save,model.layers.*=recompute")
    assert any("self_attn" in path for path in modules(program, whole))
    assert not any("self_attn" in path for path in modules(program, part))


def test_what_the_backward_reads_of_a_module_is_offloaded(program):
    decision = decide(program, "layers.*.mlp=offload")
    assert decision.offload and not decision.recompute
    owners = {meta(node)["name"]: meta(node)["module"] for node in program.operations(FORWARD)}
    assert all(".mlp" in owners[name] for name in decision.offload)
    assert not any(name.endswith(("/t", "/view", "/transpose")) for name in decision.offload)


def test_what_is_recomputed_from_is_offloaded_and_not_what_is_recomputed(program):
    table = "*.mlp=recompute,layers.*=offload"
    decision = decide(program, table)
    assert decision.offload and decision.recompute
    assert not {*decision.offload} & decision.recompute.keys()
    # The norm's result is read by products that are recomputed, and by nothing else in the backward.
    alone = decide(program, "*.mlp=recompute,*.post_attention_layernorm=offload")
    assert any("post_attention_layernorm" in name for name in alone.offload)


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return torch.exp(self.second(h)).sum(), h.view(-1)


def test_a_result_stays_on_the_device_and_a_note_says_so():
    batch = spec_of({"x": torch.ones(5, 3)})
    source = Source(Returning(), lambda model, given: model(**given), batch, None)
    program = capture_of(source, StepSettings()).gradients(as_module=True).programs["gradients"]
    decision = decide(program, "*=offload")
    assert decision.offload == ("exp",)
    (note,) = decision.notes
    assert note == "memory: a result of the step stays on the device, and is not offloaded: tanh"


def test_a_pattern_that_fits_nothing_names_near_misses(program):
    decision = decide(program, "layers.*.mpl=recompute")
    assert not decision.recompute
    (note,) = decision.notes
    assert "fit the pattern 'layers.*.mpl'" in note
    assert "near misses: model.layers." in note


def test_a_program_without_a_forward_has_nothing_to_note():
    model = tiny_llama(1)
    names = [name for name, _ in model.named_parameters()]
    nothing = BatchSpec((), (), pytree.tree_structure(()))
    source = Source(model, default_loss, nothing, adamw(model))
    update = capture_of(source, StepSettings("adamw")).update(names).programs["update"]
    assert not decide(update, "layers.*=offload").notes


def test_a_pattern_whose_modules_an_earlier_one_took_did_fit(program):
    decision = decide(program, "layers.*=recompute,layers.1=save")
    assert not decision.notes
