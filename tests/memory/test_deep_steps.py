"""Within a budget a deep step is simulated whole once or twice, and as seldom however deep it is."""

import pytest

from stepgraph.memory import decide as deciding
from stepgraph.memory.by_policy import decide_by_policy
from stepgraph.memory.solver import profile as profiles
from stepgraph.memory.solver import search as searching
from stepgraph.pipeline import simulation
from tests.memory.solver.search_support import DEVICE, llama_program, plan_on
from tests.support import HOST

FEW, MORE = 8, 11  # layers
NAMED = ("none", "full", "ops")


@pytest.fixture(autouse=True)
def all_are_deep(monkeypatch):
    """Steps of a few hundred operations, as of many thousands."""
    for module in (profiles, deciding):
        monkeypatch.setattr(module, "MANY", 100)
    monkeypatch.setattr(searching, "_OPERATIONS", 1)


def decided(layers, part):
    """A budget between what named policies take, the decision, and how often what was simulated."""
    program, simulate = llama_program(layers), simulation(plan_on(), HOST)
    named = [simulate(program, decide_by_policy(program, name)) for name in NAMED]
    low, high = (pick(trial.memory.peak() for trial in named) for pick in (min, max))
    budget = int(low + part * (high - low))
    sizes: list[int] = []

    def counted(step, decision):
        sizes.append(len(step.graph.nodes))
        return simulate(step, decision)

    means = deciding.Means(counted, DEVICE, fused=True)
    found = deciding.decide(program, f"budget:{budget}B", True, lambda: means)
    whole = sizes.count(len(program.graph.nodes))
    return budget, simulate(program, found), whole, len(sizes) - whole, named


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 0.5])
def test_whole_simulations_are_few_however_deep_it_is(part):
    for layers in (FEW, MORE):
        budget, trial, whole, short, named = decided(layers, part)
        assert trial.memory.peak() <= budget
        assert trial.seconds <= min(t.seconds for t in named if t.memory.peak() <= budget)
        assert whole <= 3 and short <= 45
