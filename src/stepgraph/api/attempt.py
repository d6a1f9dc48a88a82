"""A plan that was tried, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepgraph.cost.memory import CATEGORIES
from stepgraph.cost.predict import Prediction
from stepgraph.errors import BudgetError
from stepgraph.pipeline import Made
from stepgraph.planning.plan import Plan
from stepgraph.planning.sizes import show_bytes, show_bytes_up


@dataclass
class Attempt:
    """A plan, and whether it fits: ``largest`` is the category that takes most bytes at any time."""

    plan: Plan
    made: Made
    peak: int
    budget: int
    largest: tuple[str, int]
    predicted: Prediction

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget."""
        return self.peak <= self.budget

    def error(self) -> BudgetError:
        """Says how much is missing, and what takes the most."""
        name, size = self.largest
        plan, smallest = self.plan, show_bytes_up(self.peak)
        return BudgetError(
            f"no plan fits {show_bytes(self.budget)} a rank: the smallest peak is {smallest}",
            where=f"{plan.placement} on mesh {plan.mesh}, memory {plan.memory}",
            why=f"{name} take up to {show_bytes(size)}",
            do=f"give at least {smallest}, more ranks, or fewer rows a rank; or {_HELP[name]}",
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


def attempt_of(made: Made, budget: int, predicted: Prediction) -> Attempt:
    """A plan with what its step is predicted to take."""
    on_device = {name: predicted.bytes_by_category.get(name, 0) for name in CATEGORIES}
    largest = max(on_device.items(), key=lambda row: row[1])
    return Attempt(made.plan, made, math.ceil(predicted.peak_bytes), budget, largest, predicted)
