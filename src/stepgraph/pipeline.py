"""The roads: which passes a Program goes through, in which order; and the two questions of each room.

::

    module + batch --capture--> Programs
    Programs + request --decide--> Plan
    Programs + Plan --placement--> --memory--> --schedule--> --bind--> Programs (one rank's own)
    Program + Target --lowering--> what is executed

:func:`decide` asks the rooms in this order, each on what the one before has made, and :func:`apply` does
what they said. The road of code that is captured graph by graph is made of the same stretches
(:mod:`stepgraph.graphwise`).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stepgraph.capture.passes.accumulate_gradients import accumulate_gradients
from stepgraph.capture.passes.cast_parameters import cast_parameters
from stepgraph.capture.passes.clip_gradients import clip_gradients
from stepgraph.capture.passes.draw_seed import draw_seed
from stepgraph.capture.passes.drop_empty_cat_operands import drop_empty_cat_operands
from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.finish_accumulation import finish_accumulation
from stepgraph.capture.passes.index_rows_in_place import index_rows_in_place
from stepgraph.capture.passes.key_random_operations import key_random_operations
from stepgraph.capture.passes.recognise_masks import recognise_masks
from stepgraph.capture.passes.reduce_gradients_in import reduce_gradients_in
from stepgraph.capture.passes.start_backward_at_one import start_backward_at_one
from stepgraph.capture.passes.update_parameters import update_parameters
from stepgraph.capture.step import Capture, Roads, Source
from stepgraph.cost.device import Device
from stepgraph.cost.predict import Prediction, Trial, predict, try_program
from stepgraph.errors import PlanError
from stepgraph.lowering import apply as lowering
from stepgraph.lowering.costed import costed
from stepgraph.lowering.decide import decide as decide_lowering
from stepgraph.lowering.passes.add_up_in_place import add_up_in_place
from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.lowering.passes.choose_attention_kernels import choose_attention_kernels
from stepgraph.lowering.passes.communicate_between_layers import communicate_between_layers
from stepgraph.lowering.passes.compute_pieces_in_place import compute_pieces_in_place
from stepgraph.lowering.passes.fuse_square_sums import fuse_square_sums
from stepgraph.lowering.passes.fuse_updates import fuse_updates
from stepgraph.lowering.passes.move_to_target import move_to_target
from stepgraph.lowering.passes.name_groups import name_groups
from stepgraph.lowering.passes.name_mesh_dims import name_mesh_dims
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.memory import apply as memory
from stepgraph.memory.decide import WEIGHED, Means, frontier, leanest
from stepgraph.memory.decide import decide as decide_memory
from stepgraph.memory.passes.compute_logits_in_pieces import compute_logits_in_pieces
from stepgraph.memory.passes.offload_states import offload_states
from stepgraph.memory.passes.offload_to_host import offload_to_host
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.memory.presets import budget_of
from stepgraph.placement import apply as placement
from stepgraph.placement.decide import decide as decide_placement
from stepgraph.placement.decide import wants_views_apart
from stepgraph.placement.passes.compare_with_classes import compare_with_classes
from stepgraph.placement.passes.copy_views import copy_views
from stepgraph.placement.passes.draw_by_global_row import draw_by_global_row
from stepgraph.placement.passes.place_markers import place_markers
from stepgraph.placement.passes.place_values import place_values
from stepgraph.placement.passes.spell_out_log_softmax import spell_out_log_softmax
from stepgraph.placement.passes.spell_out_norms import spell_out_norms
from stepgraph.placement.passes.sum_over_ranks import sum_over_ranks
from stepgraph.placement.presets.named import gathers_again
from stepgraph.placement.solver.held_bytes import first_limit
from stepgraph.placement.solver.room import Room
from stepgraph.planning.decisions import Decisions, FrontierPoint, MemoryDecision, PlacementDecision
from stepgraph.planning.facts import ValueFacts, gather_facts
from stepgraph.planning.plan import Plan, states_away
from stepgraph.planning.request import AUTO, StepSettings, is_searched
from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass
from stepgraph.schedule import apply as schedule
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early

Road = tuple[Pass, ...]
ALL_RANKS = -1  # one program for all of them, not bound to any
STEP = ("step", "accumulate")  # programs of a step, which may be of micro-batches

# What was captured, before anything is decided.
SIMPLIFIED: Road = (
    key_random_operations,
    drop_identities,
    drop_empty_cat_operands,
    index_rows_in_place,
    recognise_masks,
    cast_parameters,
)
# The programs of a step: that of all micro-batches but the last, and that of the last.
ACCUMULATED: Road = (accumulate_gradients, start_backward_at_one)
UPDATED: Road = (
    finish_accumulation,
    start_backward_at_one,
    reduce_gradients_in,
    clip_gradients,
    update_parameters,
)
# Those of the split use.
REDUCED: Road = (reduce_gradients_in,)
UPDATED_ALONE: Road = (clip_gradients, update_parameters)
# The rooms.
FORMED: Road = (spell_out_log_softmax, spell_out_norms, copy_views)
PLACED: Road = (draw_by_global_row, place_values, compare_with_classes)
REMEMBERED: Road = (
    compute_logits_in_pieces, recompute_in_backward, offload_to_host, offload_states,
)  # fmt: skip
SCHEDULED: Road = (merge_small_collectives, update_early, delay_waits)
BOUND: Road = (bind_to_rank,)
TARGETED: Road = (move_to_target, choose_attention_kernels)
LOWERED: Road = (
    write_state_in_place, add_up_in_place, compute_pieces_in_place, fuse_square_sums, fuse_updates,
    communicate_between_layers, name_groups,
)  # fmt: skip
# One graph of many, in place of what is captured, formed and placed.
GRAPH_CAPTURED: Road = (name_mesh_dims, key_random_operations, draw_seed)
GRAPH_PLACED: Road = (place_markers,)
GRAPH_SUMMED: Road = (sum_over_ranks,)
GRAPH_TARGETED: Road = (choose_attention_kernels,)
GRAPH_LOWERED: Road = (name_groups,)

ROADS: dict[str, Road] = {
    "captured": SIMPLIFIED,
    "accumulate": ACCUMULATED,
    "step": UPDATED,
    "gradients": REDUCED,
    "update": UPDATED_ALONE,
    "formed": FORMED,
    "placed": PLACED,
    "remembered": REMEMBERED,
    "scheduled": SCHEDULED,
    "bound": BOUND,
    "targeted": TARGETED,
    "lowered": LOWERED,
    "graph by graph, captured": GRAPH_CAPTURED,
    "graph by graph, placed": GRAPH_PLACED,
    "graph by graph, summed": GRAPH_SUMMED,
    "graph by graph, targeted": GRAPH_TARGETED,
    "graph by graph, lowered": GRAPH_LOWERED,
}

CAPTURE = Roads(SIMPLIFIED, ACCUMULATED, UPDATED, REDUCED, UPDATED_ALONE)


def capture_of(source: Source, settings: StepSettings, driver: PassDriver | None = None) -> Capture:
    """What captures the programs of a step."""
    return Capture(source, settings, CAPTURE, driver or PassDriver())


@dataclass
class Made:
    """A plan, and what it makes of the programs that it was asked about: one rank's own.

    ``decided``: for each; ``facts``: what is to be told of values, ``frontiers``: with how much memory each
    can be run, where that was asked for; ``trials``: what each takes, where that is known already.
    """

    plan: Plan
    programs: dict[str, Program] = field(default_factory=dict)
    decided: dict[str, Decisions] = field(default_factory=dict)
    facts: dict[str, Mapping[str, ValueFacts]] = field(default_factory=dict)
    frontiers: dict[str, tuple[FrontierPoint, ...]] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)


def in_order(programs: Mapping[str, Program]) -> list[tuple[str, Program]]:
    """The programs of a step in the order in which they are decided: all there is to decide first."""
    return sorted(programs.items(), key=lambda item: item[0] != "step")


def decide(programs: Mapping[str, Program], plan: Plan, target: Target) -> Plan:
    """A plan that holds the four decisions for programs; what it holds already is not decided again.

    Args:
        programs: with global shapes, as captured; they stay as they are.
        plan: its request names the policies.
        target: what the programs run on.

    Raises:
        PlanError: the plan is final, and does not fit a program.
    """
    return make(programs, plan, target).plan


def apply(
    programs: Mapping[str, Program], plan: Plan, target: Target, rank: int = 0
) -> dict[str, Program]:
    """What one rank runs of programs, under a plan that has decided them; nothing is decided.

    Raises:
        PlanError: the plan lacks the decisions for a program.
    """
    made = make(programs, plan, target, rank=rank)
    if made.plan != plan:
        raise PlanError(
            f"the plan has not decided all of {', '.join(programs)}",
            do="let pipeline.decide add what it lacks",
        )
    return made.programs


def make(
    programs: Mapping[str, Program],
    plan: Plan,
    target: Target,
    rank: int = 0,
    *,
    driver: PassDriver | None = None,
    room: Room | None = None,
    with_facts: bool = False,
    with_frontier: bool = False,
    keep: bool = True,
    strict: bool = False,
    logits: str = WEIGHED,
) -> Made:
    """Decides and applies at once, each room on what the one before has made.

    Args:
        rank: whose programs are made; or :data:`ALL_RANKS`.
        room: what a solver may hold; by default, what the request gives it.
        with_facts: gather what a plan file tells of values.
        with_frontier: find out by how much memory each program can be run; the plan names a device.
        keep: the programs are needed again.
        strict: nothing is drawn that another mesh would draw otherwise.
        logits: how they are under a named memory policy and a budget (:mod:`stepgraph.memory.decide`).
    """
    made = Made(plan)
    asked = (driver or PassDriver(), room, with_facts, with_frontier, strict, logits)
    for name, program in in_order(programs):
        _through_rooms(program.copy() if keep else program, name, made, target, rank, *asked)
    return made


def _through_rooms(
    program: Program,
    name: str,
    made: Made,
    target: Target,
    rank: int,
    driver: PassDriver,
    room: Room | None,
    with_facts: bool,
    with_frontier: bool,
    strict: bool,
    logits: str,
) -> None:
    """One program through the rooms, decided where the plan has not decided it."""
    plan, request, mesh = made.plan, made.plan.request, made.plan.mesh
    micro_batches = request.step.micro_batches if name in STEP else 1
    program = form(program, plan, driver)
    key = plan.key_of(program)
    if key is None:
        key = plan.new_key(program.name)
        plan = plan.with_decisions(key, Decisions(place(program, plan, room)))
    decided = plan.decisions[key]
    formed = program
    program = placement.apply(program, decided.placement, mesh, micro_batches, PLACED, driver)
    kept, again = decided.memory, gathers_again(plan.decides, mesh)
    means = functools.cache(lambda: _means(plan, target))
    if kept is None:
        weighs = means if request.weighs_memory else None
        kept = decide_memory(program, request.memory, again, weighs, logits, states_away(plan))
        decided = replace(decided, memory=kept)
        if is_searched(request.memory) and (found := means().found):
            made.trials[name] = found
    if with_frontier:
        made.frontiers[name] = frontier(program, again, means())
    program = memory.apply(program, kept, REMEMBERED, driver)
    if with_facts:
        made.facts[key] = gather_facts(formed, program, decided.placement)
    if decided.schedule is None:
        when, program = schedule.decide_and_apply(
            program, request.schedule, target, SCHEDULED, driver
        )
        decided = replace(decided, schedule=when)
    else:
        program = schedule.apply(program, decided.schedule, target, SCHEDULED, driver)
    if rank != ALL_RANKS:
        program = driver.through(BOUND, program, rank=rank)
        program = driver.through(TARGETED, program, target=target, strict=strict, rank=rank)
    how = decided.lowering
    if how is None:
        how = decide_lowering(program, request.lowering, target)
        decided = replace(decided, lowering=how)
    if how.reason:
        program.note(how.reason)
    if decided != plan.decisions[key]:
        plan = plan.with_decisions(key, decided)
    made.plan, made.programs[name], made.decided[name] = plan, program, decided


def form(program: Program, plan: Plan, driver: PassDriver) -> Program:
    """Operations whose rules keep them whole, written as such that can be sharded on this mesh."""
    decided = (d for key, d in plan.decisions.items() if key.split("#")[0] == program.name)
    known = next((d.placement.views_apart for d in decided), None)
    views_apart = wants_views_apart(plan.decides) if known is None else known
    return driver.through(FORMED, program, mesh=plan.mesh, views_apart=views_apart)


def place(program: Program, plan: Plan, room: Room | None = None) -> PlacementDecision:
    """Where the values of a formed Program live; ``room``: as :func:`make` has it."""
    request, policy = plan.request, plan.decides
    device = request.costs() if policy == AUTO else None
    recomputed: Mapping[str, int] = {}
    if device is not None:
        budget = budget_of(request.memory, request.memory_budget)
        counted = None if budget is None else request.counted(budget)
        limit = (room and room.limit) or first_limit(counted, request.counted(device.capacity))
        room = replace(room or Room(), limit=limit)
        recomputed = decide_memory(program, leanest(request.memory)).recompute
    return decide_placement(
        program, request.mesh, policy,
        known_inputs=plan.inputs(), device=device, constraints=request.constraints,
        room=room, recomputed=recomputed,
    )  # fmt: skip


def simulation(plan: Plan, target: Target) -> Callable[[Program, MemoryDecision], Trial]:
    """Tries placed Programs under memory decisions: what is simulated is what would run.

    On the request's device, scheduled and lowered as it asks for, bound to the first rank.
    """
    request, device = plan.request, plan.request.costs()
    driver = PassDriver()
    there: dict[int, tuple[Program, Program]] = {}  # what was tried, and that on the target

    def simulate(program: Program, decision: MemoryDecision) -> Trial:
        if id(program) not in there:
            there[id(program)] = program, driver.run(move_to_target, program.copy(), target=target)
        program = memory.apply(there[id(program)][1].copy(), decision, REMEMBERED, driver)
        _, program = schedule.decide_and_apply(program, request.schedule, target, SCHEDULED, driver)
        program = driver.through(BOUND, program, rank=0)
        program = driver.through(TARGETED, program, target=target, strict=False, rank=0)
        program = executed(program, request.lowering, {}, driver, keep=False)
        return try_program(costed(program, request.lowering), device)

    return simulate


def _means(plan: Plan, target: Target) -> Means:
    """What a search for what is kept goes by."""
    request, simulate = plan.request, simulation(plan, target)
    fused, budget = LOWERINGS[request.lowering].fuses, request.memory_budget
    return Means(simulate, request.costs(), fused, budget, request.counted)


def executed(
    program: Program,
    lowering_name: str,
    groups: Mapping[str, str],
    driver: PassDriver,
    keep: bool = True,
) -> Program:
    """What is executed of a bound Program.

    Args:
        lowering_name: by which lowering.
        keep: it is needed again.
        groups: names of mesh dimensions -> names of the rank's process groups; none where no ranks run.
    """
    program = program.copy() if keep else program
    return lowering.apply(program, lowering_name, groups, LOWERED, driver)


def foresee(
    programs: Mapping[str, Program],
    device: Device,
    lowering_name: str,
    micro_batches: int = 1,
    keep: bool = True,
) -> Prediction:
    """Predicts a step: time, memory and collectives of what is executed of bound programs.

    Args:
        device: what they would run on.
        lowering_name: says whether operations run one by one or fused.
        keep: the programs are needed again.
    """
    return predict(as_executed(programs, lowering_name, keep), device, micro_batches)


def as_executed(
    programs: Mapping[str, Program], lowering_name: str, keep: bool = True
) -> dict[str, Program]:
    """What is executed of bound programs, as a prediction takes it: with each operation's traffic."""
    made = {n: executed(p, lowering_name, {}, PassDriver(), keep) for n, p in programs.items()}
    return {name: costed(program, lowering_name) for name, program in made.items()}
