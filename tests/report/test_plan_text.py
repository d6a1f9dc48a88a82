from dataclasses import replace

from stepgraph.report.text import (
    comparison,
    plan_page,
    plan_summary,
    ranked,
    tokens_per_second,
)
from tests.planning.plan_support import llama_plan, placed_otherwise


def test_a_summary_fits_a_screen():
    lines = plan_summary(llama_plan(), "tiny").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0] == "tiny on dp=2,tp=2 (4 ranks): tp+zero3, memory full"
    assert "MFU" in text and "of 80.00 GiB a rank" in text and "error: not measured" in text
    assert "all_gather      dp" in text
    assert "beside tensors 4.40 GiB (assumed, not measured: 1 GiB of context" in text
    assert "  S(1)S(0)     model.layers.*.mlp.up_proj.weight x2" in lines


def test_a_summary_of_many_groups_is_cut():
    inputs = llama_plan().decisions["step"].placement.inputs
    more = {f"Param(part{chr(97 + i)}.weight)": inputs["Param(lm_head.weight)"] for i in range(20)}
    plan = placed_otherwise(replace(llama_plan(), fingerprint=None), inputs={**inputs, **more})
    lines = plan_summary(plan).splitlines()
    assert "  and 20 more groups of parameters" in lines and len(lines) <= 40


def test_what_is_no_tensor_may_be_what_does_not_fit():
    plan = llama_plan()
    assert "more than the device has" not in plan_summary(plan)
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=78 * 2**30))
    assert "more than the device has" in " ".join(plan_summary(plan).split())


def test_the_gap_is_told_where_there_is_one():
    plan = replace(llama_plan(), predicted=llama_plan().predicted.with_gap(0.0042))
    assert "gap 0.42% (certified)" in plan_summary(plan)
    assert "certified" not in plan_summary(llama_plan())


def test_a_plan_without_prediction_has_a_summary():
    plan = llama_plan()
    plan = replace(plan, predicted=None, request=replace(plan.request, device=""))
    assert plan_summary(plan).splitlines()[1] == "parameters on (dp, tp)"


def test_the_fastest_that_fits_comes_first():
    fast, slow = llama_plan(placement="tp+ddp"), llama_plan()
    assert tokens_per_second(fast) > tokens_per_second(slow) > 0
    assert ranked([(slow, True), (fast, True)])[0][0] is fast
    assert ranked([(slow, True), (fast, False)])[0][0] is slow
    lines = comparison([(fast, False), (slow, True)]).splitlines()
    assert lines[0].split()[:6] == ["mesh", "plan", "memory", "step", "ms", "MFU"]
    assert lines[1].split()[:3] == ["dp=2,tp=2", "tp+zero3", "full"]
    assert lines[2].endswith("!") and lines[3] == "! does not fit"
    assert lines[4].startswith("error: not measured")


def test_a_page_has_every_value_and_nothing_from_elsewhere():
    page = plan_page(llama_plan(), "<tiny>")
    assert "&lt;tiny&gt; on dp=2,tp=2" in page and "<tiny>" not in page
    assert "<td>lm_head/mm</td>" in page
    assert "http" not in page and "src=" not in page
