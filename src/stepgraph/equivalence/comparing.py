"""What a check found, and when two sets of results are the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.program import roles
from stepgraph.program.record import BITWISE, Results

NOT_COMPARED = "(not compared)"


@dataclass
class PassCheck:
    """One pass on one program: the largest difference of any result, relative to its size."""

    program: str
    name: str
    preserves: str
    difference: float
    worst: str
    ok: bool
    problem: str = ""


@dataclass
class CheckReport:
    """Every pass of a step, checked. ``first_difference`` is the pass that changed a result first.

    ``rounding``: parameters whose gradient is what rounding leaves of zero. Nobody can say what that is.
    """

    passes: list[PassCheck] = field(default_factory=list)
    rounding: set[str] = field(default_factory=set)

    @property
    def ok(self) -> bool:
        """Whether no pass changed a result by more than it may."""
        return all(check.ok for check in self.passes)

    @property
    def first_difference(self) -> str | None:
        """Name of the first pass that changed a result, or None."""
        return next((check.name for check in self.passes if not check.ok), None)

    def fail(self, name: str, program: str, problem: str) -> None:
        """A pass whose result cannot be run."""
        self.passes.append(PassCheck(program, name, "", float("inf"), "", False, problem))

    def __str__(self) -> str:
        lines = []
        for check in self.passes:
            mark = "ok  " if check.ok else "FAIL"
            detail = check.problem or (
                f"{check.difference:.1e} at {check.worst}" if check.worst else ""
            )
            lines.append(
                f"{mark} {check.program:<10} {check.name:<24} preserves {check.preserves:<27} {detail}"
            )
        if self.rounding:
            names = ", ".join(sorted(self.rounding))
            lines.append(f"not compared, as their gradient is rounding alone: {names}")
        end = "all passes agree" if self.ok else f"first difference: {self.first_difference}"
        return "\n".join([*lines, end])


def compare(
    report: CheckReport,
    program: str,
    name: str,
    preserves: str,
    old: Results | None,
    new: Results,
    inside: Iterable[torch.dtype] = (),
) -> None:
    """Adds a line to a report: what a pass made of every result that both have.

    Args:
        old: what results must be; None: nobody can say.
        inside: types that results passed through.
    """
    if old is None:
        report.passes.append(PassCheck(program, name, NOT_COMPARED, 0.0, "", True))
        return
    worst, difference = "", 0.0
    rounding = set() if preserves == BITWISE else rounding_alone(old, new)
    report.rounding |= rounding
    for role in old.keys() & new.keys():
        if _follows_from(role, rounding):
            continue
        size = relative_difference(old[role], new[role])
        if size > difference:
            worst, difference = roles.label(role), size
    allowed = 0.0 if preserves == BITWISE else tolerance(old.values(), inside)
    report.passes.append(
        PassCheck(program, name, preserves, difference, worst, difference <= allowed)
    )


def rounding_alone(old: Results, new: Results) -> set[str]:
    """Parameters whose gradient is zero but for rounding, in both: a key's bias in an attention, say.

    No entry reaches the last digit, in fp32 or its own finer type, of the largest entry of all gradients.
    """
    largest: dict[str, float] = {}
    digits: dict[str, float] = {}
    for role in old.keys() & new.keys():
        pair = old[role], new[role]
        of_one_shape = pair[0].shape == pair[1].shape and pair[0].numel()
        if isinstance(role, roles.Grad) and of_one_shape and pair[0].is_floating_point():
            entries = [value.double().abs().max().item() for value in pair]
            if all(map(math.isfinite, entries)):
                largest[role.name] = max(entries)
                types = pair[0].dtype, torch.float32
                digits[role.name] = min(torch.finfo(dtype).eps for dtype in types)
    most = max(largest.values(), default=0.0)
    return {name for name, entry in largest.items() if 0 < entry < digits[name] * most}


def _follows_from(role: roles.Output, names: Collection[str]) -> bool:
    """Whether a result is one of these parameters' gradient, or made of it."""
    match role:
        case roles.Grad(name) | roles.NewParam(name) | roles.NewOptimizerState(name):
            return name in names
        case roles.NewAccumulator(name):
            return name.removeprefix("grad:") in names
    return False


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; NaN where both are counts as equal."""
    if a.shape != b.shape:
        return float("inf")
    if a.is_complex() and b.is_complex():
        a, b = (torch.view_as_real(value.resolve_conj()) for value in (a, b))
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    if torch.equal(a, b) or not a.numel():
        return 0.0
    x, y = a.double(), b.double()
    same_nan = x.isnan() == y.isnan()
    if not bool(same_nan.all()):
        return float("inf")
    difference = (x - y).nan_to_num().abs().max().item()
    scale = x.nan_to_num().abs().max().item()
    return difference / scale if scale else float("inf") if difference else 0.0


def tolerance(values: Any, inside: Iterable[torch.dtype] = ()) -> float:
    """What another order of summation may change, relative to the largest entry of a result.

    A sum of n terms in precision eps is off by about sqrt(n) eps of its magnitude (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). The sums here have up to 2^12 terms (tokens times width of
    the models that are checked), and a result passes through a few of them: 4 * 64 eps, which is 3e-5
    in fp32. Two-byte types add up in fp32 and round once per operation: 8 eps. ``inside``: types that
    results passed through.
    """
    rounded = {v.dtype for v in values if v.is_floating_point() or v.is_complex()}
    dtypes = rounded | set(inside)
    allowed = [torch.finfo(d).eps * (256 if d.itemsize > 2 else 8) for d in dtypes]
    return max(allowed, default=0.0)
