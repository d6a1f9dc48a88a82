"""Checks a compiled step by execution: every pass, before and after it, all ranks in one process.

Each pass is run on the programs it gets in the real pipeline; the Program before it and the Program
after it are executed on the same values, and every result that both have is compared as a global
tensor. So a wrong result is found at the pass that made it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stepgraph.capture.loss import loss_of
from stepgraph.capture.module import LossFunction, default_loss, in_dtype
from stepgraph.capture.precision import AS_IT_IS, Precision
from stepgraph.equivalence.values import GlobalValues
from stepgraph.errors import InvariantError
from stepgraph.lowering.final import passes_of_a_rank
from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.pipeline import StepRequest, compile_step
from stepgraph.planning.decisions import Normalisation
from stepgraph.planning.plan import Plan
from stepgraph.program import roles
from stepgraph.program.driver import Pass, PassDriver
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.runtime.batches import LocalBatch, cut_micro_batches, flatten_batch, global_spec
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.torch_internals import pytree

# A pass that only moves, copies or renames operations computes the same bits; one that adds up in
# another order, or whose reference is torch's own code, is held to summation error (see tolerance).
BITWISE, SUMMATION = "bitwise", "summation order"
# Where random operations are keyed their bits change, and plain PyTorch on the whole batch has others.
DISTRIBUTION = "distribution (not compared)"
_OTHER_BITS = {"key_random_operations", "finish_accumulation"}
_SUMMATION_ORDER = {
    "capture", "accumulate_gradients", "finish_accumulation", "clip_gradients", "update_parameters",
    "spell_out_log_softmax", "spell_out_norms", "place_values", "reduce_gradients_in",
    "recognise_masks",
}  # fmt: skip


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
    """Every pass of a step, checked. ``first_difference`` is the pass that changed a result first."""

    passes: list[PassCheck] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no pass changed a result by more than it may."""
        return all(check.ok for check in self.passes)

    @property
    def first_difference(self) -> str | None:
        """Name of the first pass that changed a result, or None."""
        return next((check.name for check in self.passes if not check.ok), None)

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
        end = "all passes agree" if self.ok else f"first difference: {self.first_difference}"
        return "\n".join([*lines, end])


def check_model(
    model: nn.Module,
    *,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any,
    mesh: str | MeshShape = "dp=1",
    plan: str | Plan = "zero3",
    memory: str | None = None,
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    replaced: Mapping[str, Pass] | None = None,
    seed: int = 0,
    precision: Precision = AS_IT_IS,
) -> CheckReport:
    """Checks every pass of a training step of a plain module, on a mesh that need not exist.

    Args:
        model: with real parameters; it is not changed.
        batch: the *global* batch.
        mesh: names and sizes; all its ranks run in this process.
        replaced: passes to run in place of others (to plant a bug).
        seed: of the optimizer states that the programs are run on.

    Returns:
        a report with one line a pass.
    """
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    made = Plan(plan, shape) if isinstance(plan, str) else plan
    if memory is not None:
        made.memory, made.recomputation = memory, {}
    device = next(model.parameters()).device
    local = flatten_batch(batch, device)
    request = StepRequest(
        model,
        loss or default_loss,
        global_spec(local, micro_batches, 1),  # the batch is global already
        made,
        optimizer,
        micro_batches,
        max_grad_norm is not None,
        precision,
    )
    checker = _Checker(request, local, max_grad_norm, seed)
    return checker.run(dict(replaced or {}))


class _Checker:
    """Runs the pipeline with an observer that executes every pass's input and output."""

    def __init__(
        self, request: StepRequest, batch: LocalBatch, max_grad_norm: float | None, seed: int
    ) -> None:
        self.request, self.batch, self.max_grad_norm = request, batch, max_grad_norm
        self.pieces = cut_micro_batches(batch, request.micro_batches)
        self.values = GlobalValues(request, self.pieces[-1], max_grad_norm, seed)
        self.accumulate: Program | None = None
        self.report = CheckReport()

    def run(self, replaced: dict[str, Pass]) -> CheckReport:
        driver = PassDriver(invariants=True, observe=self.compare, replaced=replaced)
        try:
            compiled = compile_step(self.request, driver)
            for program in compiled.programs.values():
                if self.report.ok:
                    self._check_lowering(program, driver.replaced)
        except InvariantError as error:
            # Its result cannot even be run.
            name = str(error).split(":")[0].removeprefix("after ")
            self._fail(name, "", str(error).splitlines()[0])
        return self.report

    def compare(self, name: str, before: Program, after: Program, arguments: tuple) -> None:
        """The observer of the pass driver."""
        if not self.report.ok:
            return  # what follows a wrong pass is wrong too
        if not self.report.passes:
            with torch.random.fork_rng(devices=[]):  # both draw alike
                torch.manual_seed(0)
                eager = self._eager(self.pieces[-1])
                torch.manual_seed(0)
                self._record("capture", before, eager, self._execute(before))
        if name in _OTHER_BITS and roles.Seed() in after.inputs:
            self.report.passes.append(PassCheck(after.name, name, DISTRIBUTION, 0.0, "", True))
            return
        expect = _EXPECTED.get(name)
        try:
            old = (
                self._execute(before) if expect is None else expect(self, before, after, arguments)
            )
            new = self._execute(after)
        except AssertionError as error:
            self._fail(name, after.name, str(error))
            return
        if name == "accumulate_gradients":
            self.accumulate = after
        self._record(name, after, old, new)

    def _execute(self, program: Program, observe=None) -> dict[Any, torch.Tensor]:
        return self.values.execute(program, observe=observe)

    def _check_lowering(self, program: Program, replaced: dict[str, Pass]) -> None:
        """Every rank's own program: bound, then writing its state in place."""
        mesh = program.mesh or MeshShape((("dp", 1),))
        functional = PassDriver(invariants=True, replaced=replaced)
        in_place = PassDriver(replaced=replaced)  # the last pass may mutate
        groups = {name: name for name in mesh.names}
        before = self._execute(program)
        name = "bind_to_rank"
        try:
            bound = [
                functional.run(bind_to_rank, program.copy(), rank, groups)
                for rank in range(mesh.world_size)
            ]
            after = self.values.execute(bound)
            self._record("bind_to_rank", program, before, after)
            rewrites = passes_of_a_rank(collectives_overlap=True)
            for rewrite, settings in rewrites:
                if not self.report.ok:
                    return
                name = rewrite.__name__
                last = rewrite is rewrites[-1][0]
                driver = in_place if last else functional
                bound = [driver.run(rewrite, each, *settings) for each in bound]
                after = self.values.execute(bound, in_place=last)
                self._record(name, program, before, after)
        except AssertionError as error:
            self._fail(name, program.name, str(error))

    # -- what passes that change the meaning of results must make of them

    def _eager(self, leaves: list[Any]) -> dict[Any, torch.Tensor]:
        """Loss, gradients and written buffers of plain PyTorch."""
        model = copy.deepcopy(self.request.model)
        compute = self.request.precision.compute
        for parameter in model.parameters():
            parameter.data = in_dtype(parameter.data, compute)
        leaves = [in_dtype(x, compute) if isinstance(x, torch.Tensor) else x for x in leaves]
        batch = pytree.tree_unflatten(leaves, self.batch.tree)
        model.zero_grad(set_to_none=True)
        loss = loss_of(self.request.loss(model, batch))
        loss.backward()
        found: dict[Any, torch.Tensor] = {roles.Loss(): loss.detach()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[roles.Grad(name)] = parameter.grad
        return found | {roles.NewBuffer(name): b for name, b in model.named_buffers()}

    def _expect_accumulated(self, before: Program, after: Program, arguments: tuple):
        """Accumulators grow by the gradients per unit of the loss's normaliser, and by its parts."""
        normalisation: Normalisation = arguments[0]
        seen: dict[str, torch.Tensor] = {}
        gradients = self._execute(
            before, observe=lambda _, node, value: seen.update({node.meta["name"]: value})
        )
        unit = seen[normalisation.boundary] if normalisation.boundary else torch.ones(())
        grown = {f"total:{name}": seen[name] for name in normalisation.totals}
        grown |= {
            f"grad:{role.name}": value / unit
            for role, value in gradients.items()
            if isinstance(role, roles.Grad)
        }
        rows = dict(zip(after.inputs, after.input_values, strict=True))
        return {
            roles.NewAccumulator(name): self.values.of(
                roles.Accumulator(name), rows[roles.Accumulator(name)]
            )
            + value
            for name, value in grown.items()
        }

    def _expect_finished(self, before: Program, after: Program, arguments: tuple):
        """The whole batch at once, in plain PyTorch; or the mean over micro-batches."""
        assert self.accumulate is not None
        self.values.clear_accumulators()
        for leaves in self.pieces[:-1]:
            self.values.leaves = leaves
            sums = self._execute(self.accumulate)
            for role, value in sums.items():
                if isinstance(role, roles.NewAccumulator):
                    self.values.tensors[roles.Accumulator(role.name)] = value
        self.values.leaves = self.pieces[-1]
        if arguments[0].exact:
            return _without_buffers(self._eager(list(self.batch.leaves)))
        each = [_without_buffers(self._eager(leaves)) for leaves in self.pieces]
        return {role: sum(e[role] for e in each) / len(each) for role in each[0]}

    def _expect_clipped(self, before: Program, after: Program, arguments: tuple):
        results = self._execute(before)
        leaves = {role: torch.zeros_like(v) for role, v in results.items()}
        gradients = [role for role in results if isinstance(role, roles.Grad)]
        for role in gradients:
            leaves[role].grad = results[role].clone()
        torch.nn.utils.clip_grad_norm_([leaves[r] for r in gradients], self.max_grad_norm or 0.0)
        return results | {role: leaves[role].grad for role in gradients}

    def _expect_updated(self, before: Program, after: Program, arguments: tuple):
        """One step of the user's own optimizer, from the states that the program is run on."""
        results = self._execute(before)
        return results | self.values.step_optimizer(results, after)

    # -- records

    def _record(self, name: str, program: Program, old, new) -> None:
        preserves = SUMMATION if name in _SUMMATION_ORDER else BITWISE
        worst, difference = "", 0.0
        for role in old.keys() & new.keys():
            size = relative_difference(old[role], new[role])
            if size > difference:
                worst, difference = roles.label(role), size
        allowed = tolerance(old.values(), self._types()) if preserves == SUMMATION else 0.0
        self.report.passes.append(
            PassCheck(program.name, name, preserves, difference, worst, difference <= allowed)
        )

    def _types(self) -> set[torch.dtype]:
        precision = self.request.precision
        return {dtype for dtype in (precision.compute, precision.reduce) if dtype is not None}

    def _fail(self, name: str, program: str, problem: str) -> None:
        self.report.passes.append(PassCheck(program, name, "", float("inf"), "", False, problem))


_EXPECTED: dict[str, Callable[..., dict[Any, torch.Tensor]]] = {
    "accumulate_gradients": _Checker._expect_accumulated,
    "finish_accumulation": _Checker._expect_finished,
    "clip_gradients": _Checker._expect_clipped,
    "update_parameters": _Checker._expect_updated,
}


def _without_buffers(results: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {role: v for role, v in results.items() if not isinstance(role, roles.NewBuffer)}


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; NaN where both are counts as equal."""
    if a.shape != b.shape:
        return float("inf")
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
    dtypes = {value.dtype for value in values if value.is_floating_point()} | set(inside)
    allowed = [torch.finfo(d).eps * (256 if d.itemsize > 2 else 8) for d in dtypes]
    return max(allowed, default=0.0)
