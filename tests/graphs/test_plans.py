"""A plan says whether its step can be one CUDA graph: in its report, its file, and for a model."""

from dataclasses import replace

import torch

import stepgraph
from stepgraph.api.plan import Plan
from stepgraph.report.text import plan_page, plan_summary
from tests.graphs.programs import Net
from tests.planning.plan_support import llama_plan

LINE = "graph   the step can be captured as one CUDA graph"


def histogram(y, x):
    return y.sum() * torch.histc(x, 4)


def test_that_it_can():
    plan = llama_plan()
    assert plan.graph_obstacles == ()
    assert LINE in plan_summary(plan).splitlines() and LINE in plan_page(plan)


def test_what_is_in_the_way_is_told_and_kept(tmp_path):
    how = {"example": torch.zeros(4, 4), "loss": lambda model, batch: model(batch)}
    plan = stepgraph.plan(
        Net(histogram), mesh="dp=2", placement="zero1", memory="none", compute_dtype=None, **how
    )
    (one,) = plan.obstacles(Net(histogram), **how)
    assert plan.graph_obstacles == (str(one),)
    assert (one.node, one.module) == ("histc", "")
    assert one.source.startswith("test_plans.py:") and "in histogram: return" in one.source
    told = " ".join(plan.report().split())
    assert "graph not one CUDA graph: its kernel waits for the device" in told
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").graph_obstacles == plan.graph_obstacles
    several = replace(plan, graph_obstacles=("first", "second", "third"))
    assert "graph   not one CUDA graph: first; and 2 more" in plan_summary(several)


def test_a_plan_that_was_not_asked_says_nothing():
    assert "graph " not in plan_summary(replace(llama_plan(), graph_obstacles=None))


def test_another_memory_policy_is_another_question():
    assert llama_plan().under(memory="none").graph_obstacles is None
    assert llama_plan().under(lowering="eager").graph_obstacles == ()
