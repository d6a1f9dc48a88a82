"""How much a solver may hold, so that the peak of what it finds uses a budget."""

import math
from collections.abc import Collection

from stepgraph.cost.work import stored_bytes
from stepgraph.operators.views import viewed
from stepgraph.placement.solver.dataflow import needed_by_backward
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

# A solver adds up gradients, activations and the largest step, which are not all alive at once.
OVERCOUNT = 1.25


def first_limit(budget: int | None, capacity: int) -> int:
    """Bytes that a solver may hold before one has seen a peak.

    Within a budget all of it is to be used; below the device's capacity it is enough to fit at once.
    """
    return capacity if budget is None else int(OVERCOUNT * budget)


def least_bytes(program: Program, ranks: int, recomputed: Collection[str]) -> int:
    """Bytes that a rank holds at least, however values are sharded; found without a solver."""
    return sum(whole_bytes(program, recomputed)) // ranks


def whole_bytes(program: Program, recomputed: Collection[str]) -> tuple[int, int]:
    """Bytes that all ranks hold together at least: of parameters and states, and for the backward.

    Args:
        program: global.
        recomputed: stable names of forward operations that are not kept for the backward.
    """
    kept = (
        node
        for node in needed_by_backward(program, recomputed)
        if viewed(node) is None and meta(node)["name"] not in recomputed
    )
    stored = (
        math.prod(value.shape) * value.dtype.itemsize
        for role, _, value in program.input_rows
        if isinstance(role, (roles.Param, roles.OptimizerState))
    )
    return sum(stored), sum(stored_bytes(meta(node)["val"]) for node in kept)


class Limits:
    """How many bytes a solver may hold, so that the peak, which it knows in part, uses the budget.

    What it holds is lowered by what the peak is too high, and raised again where that was too much.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.least = 1.0  # nothing is feasible below
        self.too_much = math.inf  # held so much, the peak did not fit
        self.its_peak = math.inf

    def after(self, held: float, peak: int) -> int | None:
        """The next limit after a solution; None: that one will do."""
        room = self.budget - peak
        if room < 0:
            if held < self.too_much:
                self.too_much, self.its_peak = held, peak
            less = max(-1.02 * room, held * (1 - 0.98 * self.budget / peak))
            limit = max(held - less, self.least)
            return int(limit) if limit < 0.99 * self.too_much else None
        limit = min(held + 0.95 * room, 0.98 * self.too_much)
        if held < self.too_much < math.inf:  # the budget lies between two peaks, which may jump
            between = self.too_much - held
            part = max(0.95 * room / (self.its_peak - peak), 0.5)
            limit = min(limit, held + part * between)
        tight = self.least > 1 or math.isfinite(self.too_much)
        return int(limit) if tight and limit > 1.05 * held else None

    def raised_to(self, least: int) -> int | None:
        """The next limit after one that nothing satisfies."""
        known, self.least = self.least, 1.01 * least
        return int(self.least) if known < self.least < 0.99 * self.too_much else None
