from dataclasses import replace

import pytest

from stepgraph.errors import UsageError
from stepgraph.planning.decisions import Reason
from stepgraph.planning.explanation import explain, overview
from tests.planning.plan_support import llama_plan, with_reason


def test_a_parameter_is_explained_with_its_cast_and_its_gathers():
    text = explain(llama_plan(), "model.layers.1.mlp.up_proj.weight")
    assert text.startswith("model.layers.1.mlp.up_proj.weight: parameter, float32[24, 16]\n")
    assert "S(1)S(0): dimension 1 sharded over dp=2; dimension 0 sharded over tp=2" in text
    assert "by the preset tp+zero3" in text
    assert "forward: all_gather over dp, " in text
    assert "backward: all_gather over dp, " in text


def test_every_value_has_an_explanation():
    plan = llama_plan()
    decision = plan.decisions["step"].placement
    for name in (*decision.inputs, *decision.operations, *decision.outputs):
        assert "lives" in explain(plan, name)


@pytest.mark.parametrize("value", ["labels", "input:labels", "UserInput(1.labels)"])
def test_an_input_goes_by_several_names(value):
    assert explain(llama_plan(), value).startswith("labels: input, int64[12, 8]\n")


def test_memory_is_explained():
    kept = explain(llama_plan(memory="none"), "model.layers.0.mlp/mul")
    again = explain(llama_plan(), "model.layers.0.mlp/mul")
    assert "kept, if the backward reads it" in kept
    assert "recomputed in the backward, in block " in again
    assert "memory" not in explain(llama_plan(), "model.layers.0.mlp/mul.backward")


def test_logits_in_pieces_are_explained():
    plan = llama_plan()
    memory = replace(plan.decisions["step"].memory, pieces={"lm_head/mm": 8})
    plan = plan.with_decisions("step", replace(plan.decisions["step"], memory=memory))
    assert "never whole: in 8 pieces of its rows" in explain(plan, "lm_head/mm")
    assert llama_plan().diff(plan) == "step: lm_head/mm in 1 -> 8 pieces of its rows"


def test_what_is_offloaded_is_explained():
    plan, name = llama_plan(), "model.layers.0.mlp/mul"
    memory = replace(plan.decisions["step"].memory, recompute={}, offload=(name,))
    other = plan.with_decisions("step", replace(plan.decisions["step"], memory=memory))
    assert "waits for the backward in the host's memory" in explain(other, name)
    lines = plan.diff(other).splitlines()
    assert "step: 1 values offloaded only then: model.layers.*.mlp/mul [0]" in lines
    assert any("no longer offloaded" in line for line in other.diff(plan).splitlines())


def test_a_state_on_the_host_is_explained():
    plan, label = llama_plan(), "OptimizerState(model.norm.weight.exp_avg)"
    memory = replace(plan.decisions["step"].memory, recompute={}, offload=(label,))
    other = plan.with_decisions("step", replace(plan.decisions["step"], memory=memory))
    assert "waits in the host's memory from one update to the next" in explain(other, label)
    assert "host" not in explain(plan, label)


def test_the_runner_up_of_a_solver_is_told_with_its_cost():
    reason = Reason("S(0)R", 0.25, "S(0)S(1)", 0.5)
    text = explain(with_reason(llama_plan(), "lm_head/mm", reason), "lm_head/mm")
    assert "chosen   S(0)R, 0.25 ms\n" in text
    assert "instead  S(0)S(1), 0.5 ms\n" in text
    alone = with_reason(llama_plan(), "lm_head/mm", replace(reason, runner_up=None))
    assert "there was no other choice" in explain(alone, "lm_head/mm")


def test_a_misspelt_value_has_near_misses():
    with pytest.raises(UsageError, match="did you mean 'model.layers.1.mlp.up_proj.weight'"):
        explain(llama_plan(), "model.layers.1.mlp.up_prj.weight")
    with pytest.raises(UsageError, match="ask for a parameter"):
        explain(llama_plan(), "?")


def test_an_overview_shows_how_values_are_named():
    text = overview(llama_plan())
    assert "  model.layers.*.self_attn.q_proj.weight" in text and "  input_ids" in text


def test_a_plan_of_an_engine_explains_what_it_knows():
    plan = replace(llama_plan(), values={})
    assert "lives    S(0)R" in explain(plan, "lm_head/mm")
