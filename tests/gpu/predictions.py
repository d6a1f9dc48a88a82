"""What a step is predicted to hold where operations run one by one; a plan says it of compiled ones."""

from stepgraph import pipeline
from stepgraph.cost.memory import memory_timeline


def peak_one_by_one(plan, model, example):
    """Bytes of a rank; the model is on its device, or on the meta device."""
    programs = pipeline.as_executed(plan.programs(model, example=example), plan.lowering)
    return max(memory_timeline(program).peak() for program in programs.values())
