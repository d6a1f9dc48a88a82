"""A plan that was tried, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.cost.predict import Prediction
from stepgraph.errors import BudgetError
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.pipeline import Made
from stepgraph.planning.plan import Plan
from stepgraph.planning.sizes import show_bytes


@dataclass
class Attempt:
    """A plan, and whether it fits: ``largest`` is the category with most bytes at the peak.

    ``lean``: the peak under the policy that keeps least, where its placements were found under that.
    """

    plan: Plan
    made: Made
    peak: int
    budget: int
    largest: tuple[str, int]
    predicted: Prediction | None = None
    lean: int = 0

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget."""
        return self.peak <= self.budget

    def error(self) -> BudgetError:
        """Says how much is missing, and what takes the most."""
        name, size = self.largest
        plan = self.plan
        return BudgetError(
            f"no plan fits {show_bytes(self.budget)} a rank: the smallest peak is {show_bytes(self.peak)}",
            where=f"{plan.placement} on mesh {plan.mesh}, memory {plan.memory}",
            why=f"at the peak, {name} take {show_bytes(size)}",
            do=f"give at least {show_bytes(self.peak)}, more ranks, or fewer rows a rank; or {_HELP[name]}",
        )


_HELP = {
    "parameters": "shard them: zero3, or tensor parallelism",
    "gradients": "shard them: zero2, zero3, or tensor parallelism",
    "optimizer": "shard it: zero1, zero2 or zero3",
    "inputs": "pass smaller batches",
    "activations": "recompute more of them (memory='full'), or add tensor parallelism",
    "temporaries": "add tensor parallelism: it splits the largest products",
    "communication": "gather less at once: a placement that keeps parameters whole",
}


def attempt_of(made: Made, budget: int) -> Attempt:
    """A plan with the peak of its programs."""
    peak, largest = -1, ("", 0)
    fused = LOWERINGS[made.plan.lowering].fuses
    for program in made.programs.values():
        timeline = memory_timeline(program, fused)
        totals = [sum(alive.values()) for alive in timeline.at]
        at = max(range(len(totals)), key=totals.__getitem__)
        if totals[at] > peak:
            alive = timeline.at[at]
            name = max(CATEGORIES, key=lambda c: alive.get(c, 0))
            peak, largest = totals[at], (name, alive[name])
    return Attempt(made.plan, made, peak, budget, largest)
