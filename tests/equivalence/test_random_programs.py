"""Random small modules train on random meshes as in plain PyTorch, under every policy.

Examples are drawn anew in the nightly profile (``STEPGRAPH_HYPOTHESIS=nightly``), and the same ones
every time otherwise. What it found is below, by name.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from stepgraph.program.layout import Replicate
from stepgraph.program.metadata import meta
from tests.equivalence.random_programs import Case, cases, check_case, run_case
from tests.support import notes_of

# An example costs a second, so the short profile does not look for a smaller one that fails too.
SHORT = {"max_examples": 12, "phases": [Phase.explicit, Phase.generate]}
PROFILE = {} if os.environ.get("STEPGRAPH_HYPOTHESIS") else SHORT


@settings(suppress_health_check=[HealthCheck.too_slow], **PROFILE)
@given(case=cases())
def test_steps_of_a_random_module_are_those_of_plain_pytorch(case: Case):
    check_case(case)


# ------------------------------------------------------------------------------- what it has found


def test_a_placeholder_that_a_pass_adds_has_a_name_of_its_own():
    """Two passes that find a graph of one size gave one name to two inputs (the seed, a number)."""
    check_case(Case(layers=(("attention dropout", False),)))


@pytest.mark.parametrize("layer", ["batch norm", "batch norm 2d", "plain batch norm"])
def test_a_kernel_whose_result_is_laid_out_otherwise_than_announced_is_viewed(layer):
    check_case(Case(layers=((layer, False),), mesh="dp=1"))


def test_tensor_parallelism_leaves_the_batch_to_others():
    """Attention whose heads nobody cut was cut along the batch, of too few rows for both dimensions."""
    layers = (("multi head, length first", False),)
    check_case(Case(layers=layers, mesh="dp=4,tp=2", plan="tp+zero2"))


def test_tensor_parallelism_exchanges_no_cuts():
    """A gradient cut in three by its queries, keys and values was to be cut along (length, rows)."""
    layers = (("pair 16", True), ("multi head", False), ("batch norm", False))
    check_case(Case(layers=layers, first="tokens", mesh="tp=2,dp=3", plan="tp+sp"))


@pytest.mark.parametrize(("mesh", "plan"), [("tp=2", "tp"), ("tp=2,replicate=2,shard=2", "hsdp")])
def test_the_gradient_of_a_head_that_all_heads_share_is_a_sum(mesh, plan):
    check_case(Case(layers=(("grouped attention", False),), mesh=mesh, plan=plan, micro_batches=2))


def test_attention_on_one_row_is_not_divided_by_it():
    check_case(Case(layers=(("causal attention", False),), mesh="tp=8", plan="tp"))


@pytest.mark.parametrize("layer", ["dropout", "channel dropout", "pair dropout"])
def test_under_tensor_parallelism_alone_a_mask_follows_its_row_through_micro_batches(layer):
    check_case(Case(layers=((layer, False),), mesh="tp=2", plan="tp", micro_batches=2))


def test_an_operation_that_gathers_the_batch_is_reported():
    """Rows that are concatenated with rows: no rule divides that, and what follows is whole.

    From 2.14 on torch has one: each rank takes half of every row, and computes half.
    """
    run, _ = run_case(Case(layers=(("cat rows", False),)))
    (cat,) = (n for n in run.programs["step"].graph.nodes if meta(n).get("name") == "layers.0/cat")
    told = any("aten.cat.default" in note and "replicated" in note for note in notes_of(run))
    assert told == (meta(cat)["placements"] == ((Replicate(),),))
    assert meta(cat)["val"].numel() == (4 * 4 * 8 if told else 4 * 2 * 8)


@pytest.mark.parametrize("plan", ["ddp", "zero1"])
def test_a_gradient_that_an_operator_without_a_rule_made_whole_is_accumulated(plan):
    check_case(Case(layers=(("in place", True),), loss="sum", plan=plan, micro_batches=2))


@pytest.mark.parametrize("layer", ["layer norm", "conv 1d"])
def test_a_first_layer_whose_input_needs_no_gradient_is_placed(layer):
    check_case(Case(layers=((layer, False),), first="nothing", loss="sum"))
