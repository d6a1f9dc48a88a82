"""Capture, decide, passes: a module becomes the programs of its training step, one rank's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stepgraph.analysis.normalisation import by_rows, find_normalisation, inexact
from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.module import BatchSpec, LossFunction, capture
from stepgraph.capture.optimizer import FunctionalOptimizer, functionalize_optimizer
from stepgraph.capture.passes.accumulate_gradients import accumulate_gradients
from stepgraph.capture.passes.cast_parameters import cast_parameters
from stepgraph.capture.passes.clip_gradients import clip_gradients
from stepgraph.capture.passes.drop_empty_cat_operands import drop_empty_cat_operands
from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.finish_accumulation import finish_accumulation
from stepgraph.capture.passes.index_rows_in_place import index_rows_in_place
from stepgraph.capture.passes.key_random_operations import key_random_operations
from stepgraph.capture.passes.recognise_masks import recognise_masks
from stepgraph.capture.passes.reduce_gradients_in import reduce_gradients_in
from stepgraph.capture.passes.start_backward_at_one import start_backward_at_one
from stepgraph.capture.passes.update_parameters import update_parameters
from stepgraph.capture.precision import AS_IT_IS, Precision
from stepgraph.capture.update import given_gradients, parameters_without_gradient
from stepgraph.cost.devices import find_device
from stepgraph.errors import CaptureError, PlanError, StepgraphError
from stepgraph.memory import presets as memory_policies
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.placement.decide import decide as decide_placement
from stepgraph.placement.passes.compare_with_classes import compare_with_classes
from stepgraph.placement.passes.copy_views import copy_views
from stepgraph.placement.passes.draw_by_global_row import draw_by_global_row
from stepgraph.placement.passes.place_values import place_values
from stepgraph.placement.passes.spell_out_log_softmax import spell_out_log_softmax
from stepgraph.placement.passes.spell_out_norms import spell_out_norms
from stepgraph.placement.presets import named as placement_policies
from stepgraph.placement.solver.held_bytes import first_limit
from stepgraph.planning.decisions import Normalisation, PlacementDecision
from stepgraph.planning.plan import AUTO, Plan
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape
from stepgraph.program.mesh_roles import Role
from stepgraph.program.program import Program


@dataclass
class StepRequest:
    """Everything that the programs of a training step depend on.

    ``batch`` has the global shape of one micro-batch. ``parameters`` and ``optimizer_states`` describe
    what the optimizer updates; ``optimizer`` None: gradients only. ``counters`` are those of the run.
    """

    model: nn.Module
    loss: LossFunction
    batch: BatchSpec
    plan: Plan
    optimizer: torch.optim.Optimizer | None = None
    micro_batches: int = 1
    clip: bool = False
    precision: Precision = AS_IT_IS
    counters: SharedCounters = field(default_factory=SharedCounters)


@dataclass
class StepPrograms:
    """The compiled step before lowering: programs by name, and what runtime needs beside them.

    ``reduces_each``: gradients are reduced, in a type of their own, for every micro-batch, because the
    plan that it was captured under accumulates shards.
    """

    programs: dict[str, Program]
    optimizer: FunctionalOptimizer | None
    normalisation: Normalisation | None
    counters: SharedCounters
    reduces_each: bool
    notes: list[str]


def compile_step(
    request: StepRequest, driver: PassDriver, captured: StepPrograms | None = None
) -> StepPrograms:
    """From a module to one rank's programs: ``step``, and ``accumulate`` with micro-batches.

    Args:
        captured: what :func:`capture_step` gave for this request, whatever the plan was; not changed,
            and not used where this plan reduces gradients at other moments.
    """
    if captured is None or captured.reduces_each != _reduces_each_micro_batch(request):
        step = capture_step(request, driver)
    else:
        programs = {name: program.copy() for name, program in captured.programs.items()}
        step = replace(captured, programs=programs, notes=[*captured.notes])
    for name, program in in_order(step.programs):
        step.programs[name] = apply_plan(program, request.plan, driver, request.micro_batches)
    for program in step.programs.values():
        step.notes += [note for note in program.notes if note not in step.notes]
    return step


def in_order(programs: Mapping[str, Program]) -> list[tuple[str, Program]]:
    """The programs of a step in the order in which they are decided: all there is to decide first."""
    return sorted(programs.items(), key=lambda item: item[0] != "step")


def capture_step(request: StepRequest, driver: PassDriver) -> StepPrograms:
    """From a module to the global programs of a step, for :func:`apply_plan`."""
    joint, _ = capture(
        request.model, request.loss, request.batch, compute_dtype=request.precision.compute
    )
    joint = _simplify(joint, driver)
    joint = _mixed(request, joint, driver, request.micro_batches > 1)
    notes = parameters_without_gradient(request.model, joint)
    optimizer = None
    if request.optimizer is not None:
        optimizer = _functional(request, joint)
    programs: dict[str, Program] = {}
    normalisation = None
    if request.micro_batches > 1:
        normalisation = _normalisation(request, joint)
        if not normalisation.exact:
            notes.append(
                "micro-batches: the loss is the mean over micro-batches, because "
                f"{normalisation.reason}"
            )
        accumulate = joint.copy()
        accumulate.name = "accumulate"
        programs["accumulate"] = driver.run(accumulate_gradients, accumulate, normalisation)
        step = _named(joint, "step")
        step = driver.run(finish_accumulation, step, normalisation, request.micro_batches)
    else:
        step = driver.run(start_backward_at_one, _named(joint, "step"))
    reduces_each = _reduces_each_micro_batch(request)
    if request.precision != AS_IT_IS and not reduces_each:
        masters = _master_types(request.model)
        step = driver.run(reduce_gradients_in, step, masters, request.precision)
    if request.clip:
        step = driver.run(clip_gradients, step)
    if optimizer is not None:
        step = driver.run(update_parameters, step, optimizer, request.counters)
    programs["step"] = step
    return StepPrograms(programs, optimizer, normalisation, request.counters, reduces_each, notes)


def _normalisation(request: StepRequest, joint: Program) -> Normalisation:
    """How the loss adds up over micro-batches; numbers in it are held against twice as many rows."""
    found = find_normalisation(joint)
    if not found.exact or not found.numbers:
        return found
    try:
        larger, _ = capture(
            request.model,
            request.loss,
            request.batch.with_twice_the_rows(),
            compute_dtype=request.precision.compute,
        )
        larger = _mixed(request, _simplify(larger, PassDriver()), PassDriver(), accumulate=True)
    except CaptureError as error:
        reason = f"it has numbers in it, and cannot be captured on other rows: {error.what}"
        return inexact(joint.result(roles.Loss()), reason)
    return by_rows(found, find_normalisation(larger), joint.result(roles.Loss()))


def compile_evaluation(
    request: StepRequest, driver: PassDriver, as_module: bool = False
) -> tuple[Program, Any]:
    """The forward alone: the program ``evaluate`` and the structure of what the loss callable returns."""
    program, result_tree = capture(
        request.model,
        request.loss,
        request.batch,
        training=False,
        as_module=as_module,
        compute_dtype=request.precision.compute,
    )
    program = _simplify(_named(program, "evaluate"), driver)
    program = _mixed(request, program, driver, accumulate=False)
    return apply_plan(program, request.plan, driver), result_tree


def compile_gradients(
    request: StepRequest, driver: PassDriver, as_module: bool
) -> tuple[Program, Any, list[str]]:
    """Forward and backward without an update: the program ``gradients``, cut in two when it is lowered.

    Args:
        as_module: results and tangents are a module's; else the loss and its own.

    Returns:
        the Program; the structure of what the loss callable returns; notes for the report.
    """
    joint, tree = capture(
        request.model,
        request.loss,
        request.batch,
        as_module=as_module,
        compute_dtype=request.precision.compute,
    )
    joint = _simplify(_named(joint, "gradients"), driver)
    joint = _mixed(request, joint, driver, accumulate=False)
    notes = parameters_without_gradient(request.model, joint)
    if request.precision != AS_IT_IS:
        masters = _master_types(request.model)
        joint = driver.run(reduce_gradients_in, joint, masters, request.precision)
    program = apply_plan(joint, request.plan, driver)
    return program, tree, [*notes, *(note for note in program.notes if note not in notes)]


def compile_update(
    request: StepRequest, driver: PassDriver, names: Sequence[str], device: torch.device
) -> tuple[Program, FunctionalOptimizer]:
    """Clipping and optimizer alone, of the parameters that have a gradient: the program ``update``."""
    program = given_gradients(request.model, names, device)
    optimizer = _functional(request, program)
    if request.clip:
        program = driver.run(clip_gradients, program)
    program = driver.run(update_parameters, program, optimizer, request.counters)
    return apply_plan(program, request.plan, driver), optimizer


def apply_plan(program: Program, plan: Plan, driver: PassDriver, micro_batches: int = 1) -> Program:
    """Places and tags a global Program by the plan: replayed where it holds decisions, else decided.

    Raises:
        PlanError: a plan file holds decisions for this program that do not fit it.
    """
    program = spell_out(program, plan.mesh, driver, plan.placement)
    program, key = apply_placement(program, plan, driver, micro_batches)
    return apply_memory(program, plan, key, driver)


def spell_out(program: Program, mesh: MeshShape, driver: PassDriver, placement: str) -> Program:
    """Writes operations whose rules keep them whole as such that can be cut on this mesh."""
    if Role.TENSOR in mesh.roles:
        program = driver.run(spell_out_log_softmax, program)
    if mesh.data_size > 1:
        program = driver.run(spell_out_norms, program)
    if placement == AUTO:
        program = driver.run(copy_views, program)
    return program


def apply_placement(
    program: Program,
    plan: Plan,
    driver: PassDriver,
    micro_batches: int = 1,
    memory_limit: int | None = None,
) -> tuple[Program, str]:
    """One rank's Program, and the key of its decisions on the plan; the global one is left as it was.

    Args:
        memory_limit: for ``auto``: bytes for parameters, gradients and optimizer states.
    """
    key = plan.find_placement(program)
    if key is None:
        key = plan.new_key(program.name)
        plan.placements[key] = _decide_placement(program, plan, memory_limit)
    try:
        draw_by_global_row(program, plan.placements[key], plan.mesh, micro_batches)
        placed = driver.run(place_values, program, plan.placements[key], plan.mesh)
    except (NotImplementedError, RuntimeError, ValueError, IndexError, AssertionError) as error:
        if not plan.final or isinstance(error, StepgraphError):
            raise
        raise PlanError(
            f"the plan's placements for program {program.name!r} cannot be carried out",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            do="make the plan again; placements that are changed by hand must fit together",
        ) from error
    return driver.run(compare_with_classes, placed), key


def _decide_placement(program: Program, plan: Plan, memory_limit: int | None) -> PlacementDecision:
    if plan.placement != AUTO:
        return decide_placement(program, plan.mesh, plan.placement, known_inputs=plan.inputs())
    assert plan.settings is not None, "a plan that is to be found says for which device"
    device = find_device(plan.settings.device)
    if memory_limit is None:
        memory_limit = first_limit(plan.settings.memory_budget, device.capacity)
    recomputed = memory_policies.decide(program, plan.memory).recompute
    return decide_placement(
        program,
        plan.mesh,
        plan.placement,
        known_inputs=plan.inputs(),
        device=device,
        constraints=plan.settings.constraints,
        memory_limit=memory_limit,
        recomputed=recomputed,
    )


def apply_memory(program: Program, plan: Plan, key: str, driver: PassDriver) -> Program:
    """Tags and copies what is not kept for the backward, in place."""
    if key not in plan.recomputation:
        again = placement_policies.gathers_again(plan.placement, plan.mesh)
        plan.recomputation[key] = memory_policies.decide(program, plan.memory, again)
    return driver.run(recompute_in_backward, program, plan.recomputation[key])


def _mixed(request: StepRequest, program: Program, driver: PassDriver, accumulate: bool) -> Program:
    if request.precision == AS_IT_IS:
        return program
    masters = _master_types(request.model)
    return driver.run(cast_parameters, program, masters, request.precision, accumulate)


def _master_types(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def _reduces_each_micro_batch(request: StepRequest) -> bool:
    """Whether gradients are reduced, in a type of their own, for every micro-batch."""
    if request.precision == AS_IT_IS or request.micro_batches == 1:
        return False
    storages = placement_policies.check_preset(request.plan.placement, request.plan.mesh).values()
    return any(s.accumulate_sharded for s in storages)


def _named(program: Program, name: str) -> Program:
    program.name = name
    return program


def _simplify(program: Program, driver: PassDriver) -> Program:
    for rewrite in (
        key_random_operations,
        drop_identities,
        drop_empty_cat_operands,
        index_rows_in_place,
        recognise_masks,
    ):
        program = driver.run(rewrite, program)
    return program


def _functional(request: StepRequest, joint: Program) -> FunctionalOptimizer:
    assert request.optimizer is not None
    named = dict(request.model.named_parameters())
    learned = {
        role.name: named[role.name] for role in joint.outputs if isinstance(role, roles.Grad)
    }
    optimizer = functionalize_optimizer(request.optimizer, learned)
    present = {
        (name, key): value
        for name, parameter in learned.items()
        for key, value in request.optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    request.counters.cover(optimizer, learned, present)
    return optimizer
