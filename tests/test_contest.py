"""``auto`` beside presets: at most what the cheapest costs; and no work that ranks could divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stepgraph.api.planner import Planner
from stepgraph.capture.module import default_loss
from stepgraph.contest import Contest, Entrant, Foreseen, enter, make_best, promising, rivals, taken
from stepgraph.cost.devices import find_device
from stepgraph.cost.memory import memory_timeline
from stepgraph.cost.work import node_flops
from stepgraph.equivalence.check import _Checker
from stepgraph.errors import StepgraphError
from stepgraph.pipeline import Made, apply, foresee, make
from stepgraph.placement.solver.room import Room
from stepgraph.planning.explanation import explain
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program.program import Program
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.solver.test_auto_execution import MODELS
from tests.placement.solver.test_automatic import chain, gpt2, llama
from tests.sampling import sampled
from tests.support import HOST, adamw, tower

ON_HOST = HOST.device_type


def planner_of(model, batch, device: str = ON_HOST, **settings) -> Planner:
    step = StepSettings("adamw", **settings)
    return Planner(model, batch, default_loss, adamw(model), find_device(device), step)


def flops_of(program: Program) -> float:
    return sum(node_flops(n) for n in program.operations() if "recomputed_from" not in n.meta)


def share(name: str, mesh: str, rank: int = 0) -> float:
    """FLOPs of what a rank runs, over its share of all."""
    planner = planner_of(*MODELS[name]())
    shape = parse_mesh(mesh)
    plan = planner.plan(shape, "auto", "none").plan
    whole = flops_of(planner.captured("auto", shape).programs["step"])
    return flops_of(planner.programs(plan, rank)["step"]) / whole * shape.world_size


def test_within_a_budget_placements_are_searched_for_and_then_what_is_kept():
    model, batch = MODELS["chain"]()
    planner = planner_of(model, batch)
    mesh = parse_mesh("dp=2")
    programs = planner.captured("auto", mesh).programs
    asked = preset_plan("auto", mesh, device=planner.device.name, step=planner.settings)

    def peak_of(**policies):
        made = make_best(programs, asked.under(**policies), planner.target)
        return max(memory_timeline(p).peak() for p in made.programs.values()), made.plan

    none, lean = peak_of(memory="none")[0], peak_of(memory="full")[0]
    budget = max(lean, none - 1)
    peak, plan = peak_of(memory=f"budget:{budget}B")
    assert peak <= budget and plan.request.memory_budget is None
    assert plan.decisions["step"].memory.policy == plan.memory == f"budget:{budget}B"


SLOW = pytest.mark.slow
BLOCKS = ("gpt2", "llama", "bert", "vit")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("chain", "dp=2"),
        ("chain", "dp=2,tp=2"),
        pytest.param("llama", "tp=2", marks=SLOW),
        *(pytest.param(n, m, marks=SLOW) for n in BLOCKS for m in ("dp=2", "dp=2,tp=2")),
    ],
)
def test_no_rank_computes_what_another_could(name, mesh):
    """Small models, whose work takes less time than a call: a host's ranks divide it all the same."""
    assert share(name, mesh) <= 1.1


CASES = [
    ("chain", "dp=2", ON_HOST), ("chain", "dp=4", "h100"), ("chain", "tp=2", ON_HOST),
    ("chain", "replicate=2,shard=2", "h100"), ("conv", "dp=2", ON_HOST),
]  # fmt: skip
MANY_CASES = [
    (name, mesh, device)
    for name in (*BLOCKS, "conv")
    for mesh in ("dp=2", "dp=8", "dp=2,tp=2")
    for device in (ON_HOST, "h100")
]


@pytest.mark.parametrize(
    ("name", "mesh", "device"),
    [*sampled(CASES, every=4), *(pytest.param(*case, marks=SLOW) for case in MANY_CASES)],
)
def test_no_preset_costs_less(name, mesh, device):
    planner = planner_of(*MODELS[name](), device=device)
    shape = parse_mesh(mesh)
    auto = planner.plan(shape, "auto", "none").plan
    programs = planner.captured("auto", shape).programs
    names = rivals(programs, preset_plan("auto", shape, device=device))
    assert names
    for preset in names:
        try:
            plan = planner.plan(shape, preset, "none").plan
        except StepgraphError:
            continue
        assert auto.predicted.step_ms <= plan.predicted.step_ms * (1 + 1e-8), preset


@pytest.fixture
def narrow(monkeypatch):
    """A contest that a preset wins: the solver's own placements take a second more."""
    from stepgraph import contest
    from stepgraph.api import planner

    seen = []

    def slower(*given, **options):
        seen.append(foresee(*given, **options))
        if len(seen) == 1:
            return type(seen[0])(**{**vars(seen[0]), "step_ms": 1000.0})
        return seen[-1]

    for module in (
        contest,
        planner,
    ):  # it foresees the solver's answer, the contest those of presets
        monkeypatch.setattr(module, "foresee", slower)
    return seen


def test_a_preset_that_wins_is_named_explained_and_replayed(narrow):
    model, batch = chain(8, 16, 8)
    planner = planner_of(model, batch)
    shape = parse_mesh("dp=2")
    attempt = planner.plan(shape, "auto", "none")
    plan = attempt.plan
    decision = plan.decisions["step"].placement
    assert plan.placement == "auto" and decision.preset in ("ddp", "zero1", "zero3", "zero3-keep")
    (note,) = [note for note in plan.notes if note.startswith("auto: ")]
    assert f"those of the preset {decision.preset}, the cheapest of 5" in note
    assert "its own 1000 ms" not in note  # only the best are listed
    step_ms = plan.predicted.step_ms
    assert (
        step_ms == min(seen.step_ms for seen in narrow[1:])
        and plan.predicted.optimality_gap is None
    )
    for reason in plan.reasons.values():
        assert reason.cost_ms == step_ms and reason.runner_up_cost_ms == 1000.0
        assert reason.chosen != reason.runner_up
    silent = next(name for name in decision.operations if name not in decision.reasons)
    assert f"by auto: the preset {decision.preset} costs least" in explain(plan, silent)
    programs = planner.captured("auto", shape).programs
    again = apply(programs, plan, HOST)
    assert str(again["step"]) == str(
        apply(programs, preset_of(planner, decision.preset), HOST)["step"]
    )


def preset_of(planner: Planner, name: str):
    return planner.plan(parse_mesh("dp=2"), name, "none").plan


def test_programs_met_later_are_placed_by_the_preset_that_won(narrow):
    """A solver does not know all of what presets store: a fused projection in blocks."""
    model, batch = gpt2(1)
    planner, shape = planner_of(model, batch), parse_mesh("tp=2")
    plan = planner.plan(shape, "auto", "none").plan
    assert plan.decides == plan.decisions["step"].placement.preset != "auto"
    source = planner.captured("auto", shape).programs["step"].copy()
    source.name = "evaluate"
    made = make(
        {"evaluate": source}, preset_plan("auto", shape, device=ON_HOST, memory="none"), HOST
    )
    assert made.plan.decides == "auto"
    late = make({"evaluate": source}, type(plan)(plan.request, plan.decisions), HOST).plan
    assert late.decisions["evaluate"].placement.preset == plan.decides


def test_what_is_asked_for_or_decided_has_no_rivals():
    planner, shape = planner_of(*chain(8, 16, 8)), parse_mesh("dp=2")
    programs = planner.captured("auto", shape).programs
    plan = preset_plan("auto", shape, device=ON_HOST)
    assert rivals(programs, plan) == ["ddp", "zero1", "zero3", "zero3-keep"]
    assert not rivals(programs, preset_plan("zero1", shape))
    assert not rivals(programs, make(programs, plan, HOST).plan)
    assert not rivals({"evaluate": programs["step"]}, plan)
    several = plan.under(step=StepSettings("adamw", micro_batches=2))
    assert rivals(programs, several) == ["ddp", "zero1"]
    both = preset_plan("auto", parse_mesh("dp=2,tp=2"), device=ON_HOST)
    assert {"tp+ddp", "tp+sp+zero3"} <= set(rivals(programs, both)) and len(
        rivals(programs, both)
    ) == 8


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"dp": "ddp"}, ["ddp"]),
        ({"dp": "zero1"}, ["zero1"]),
        ({"*weight": "S(0)"}, ["zero3", "zero3-keep"]),
        ({"*weight": "S(1)"}, []),
    ],
)
def test_presets_that_do_not_satisfy_the_constraints_are_no_rivals(asked, left):
    planner, shape = planner_of(*chain(8, 16, 8)), parse_mesh("dp=2")
    programs = planner.captured("auto", shape).programs
    plan = preset_plan("auto", shape, device=ON_HOST).under(constraints=asked)
    contest = Contest(programs, plan, HOST, find_device(ON_HOST))
    entered = [entrant for name in rivals(programs, plan) for entrant in enter(name, contest)]
    assert [entrant.name for entrant in entered] == left
    made = make_best(programs, plan, HOST).plan.decisions["step"].placement
    assert made.preset in ("auto", *left)


def test_a_check_is_of_the_best_answer(narrow):
    """What a check goes through is what an engine would run."""
    model, batch = chain(8, 16, 8)
    plan = preset_plan("auto", parse_mesh("dp=2"), device=ON_HOST)
    plan = plan.under(memory="none", step=StepSettings("adamw"))
    leaves = flatten_batch(batch, torch.device("cpu"))
    checker = _Checker(model, default_loss, adamw(model), plan, leaves, None, 0)
    assert checker.run({}, ["step"], []).ok
    decided = checker.plan.decisions["step"].placement
    assert decided.preset in ("ddp", "zero1", "zero3", "zero3-keep")


def test_what_does_not_fit_does_not_win():
    plan = preset_plan("auto", parse_mesh("dp=2"))
    planner = planner_of(*chain(8, 8))
    some = planner.plan(plan.mesh, "ddp", "none").plan.predicted

    def winner(*answers: tuple[str, float, int]) -> str:
        entrants = [
            Entrant(name, Made(plan), replace(some, step_ms=ms, peak_bytes=size))
            for name, ms, size in answers
        ]
        return taken(entrants, 100).name

    assert winner(("auto", 2.0, 90), ("ddp", 1.0, 80)) == "ddp"
    assert winner(("auto", 2.0, 90), ("ddp", 1.0, 110)) == "auto"
    assert winner(("auto", 2.0, 120), ("ddp", 1.0, 110), ("zero1", 3.0, 105)) == "zero1"
    assert winner(("auto", 1.0, 90), ("ddp", 1.0, 80)) == "auto", "of equals its own"


def test_engines_take_the_best_too():
    planner, shape = planner_of(*chain(8, 16, 8)), parse_mesh("dp=2")
    programs = planner.captured("auto", shape).programs
    made = make_best(programs, preset_plan("auto", shape, device=ON_HOST), HOST)
    planned = planner.plan(shape, "auto", "none").plan
    assert made.plan.decisions["step"].placement == planned.decisions["step"].placement
    again = make_best(programs, made.plan, HOST)
    assert again.plan == made.plan


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=SLOW)])
@pytest.mark.parametrize("device", [ON_HOST, pytest.param("h100", marks=SLOW)])
@pytest.mark.parametrize("make_model", [lambda: llama(1), lambda: gpt2(1)], ids=["llama", "gpt2"])
def test_no_runner_up_costs_less_than_what_was_chosen(make_model, device, mesh):
    model, batch = make_model()
    planner, shape = planner_of(model, batch, device), parse_mesh(mesh)
    programs = planner.captured("auto", shape).programs
    for limit in (None, 2**20):
        plan = make(
            programs, preset_plan("auto", shape, device=device), HOST, room=Room(limit)
        ).plan
        others = [r for r in plan.reasons.values() if r.runner_up is not None]
        assert others and all(r.runner_up_cost_ms >= r.cost_ms for r in others)


# -- deep steps


def contest_of(planner: Planner, mesh: str, **asked) -> tuple[Contest, Entrant, list[str]]:
    """A contest about a step, a solver's answer that is not the best, and its rivals."""
    shape = parse_mesh(mesh)
    plan = preset_plan("auto", shape, device=planner.device.name, memory="none").under(**asked)
    programs = planner.captured("auto", shape).programs
    own = planner.plan(shape, "ddp", "none").plan.predicted
    contest = Contest(programs, plan, planner.target, planner.device)
    return contest, Entrant("auto", Made(plan), own), rivals(programs, plan)


@pytest.mark.parametrize("settings", sampled([{"micro_batches": 2, "clip": True}, {}]), ids=str)
def test_a_deep_step_is_foreseen_by_short_ones(settings):
    planner = planner_of(*tower(8), device="h100", **settings)
    contest, own, names = contest_of(planner, "dp=4", step=planner.settings)
    for foreseen in promising(own, names, contest):
        whole = planner.plan(contest.plan.mesh, foreseen.name, "none").plan.predicted.step_ms
        assert foreseen.step_ms == pytest.approx(whole, rel=0.03), foreseen
        assert foreseen.least_ms <= whole, foreseen


def test_presets_of_a_deep_step_that_surely_lose_are_left_out():
    contest, own, names = contest_of(planner_of(*tower(8)), "dp=2,tp=2")
    found = [foreseen.name for foreseen in promising(own, names, contest)]
    assert {"tp+ddp", "tp+zero3-keep"} <= set(found) <= set(names)
    assert "tp+zero3" not in found, "it gathers twice what tp+zero3-keep gathers once"
    slow = replace(own, predicted=replace(own.predicted, step_ms=own.predicted.step_ms / 10))
    beside = [foreseen.name for foreseen in promising(slow, names, contest)]
    assert not any("sp" in name for name in beside), "norms do not make a step ten times faster"
    tight = replace(contest, plan=contest.plan.under(memory_budget=10))
    small = replace(own, predicted=replace(own.predicted, peak_bytes=10))
    assert not promising(small, names, tight), "none fits"


@pytest.mark.slow
def test_the_answer_for_a_deep_step_is_that_of_a_whole_contest(monkeypatch):
    answers, entered = [], []

    def counted(name, contest):
        entered.append(name)
        return enter(name, contest)

    monkeypatch.setattr("stepgraph.contest.enter", counted)
    for many in (10**6, 10):
        monkeypatch.setattr("stepgraph.contest.MANY", many)
        planner = planner_of(*tower(8), device="h100")
        answers.append(planner.plan(parse_mesh("dp=4"), "auto", "none").plan)
        entered.append("|")
    whole, short = answers
    assert short.predicted.step_ms == whole.predicted.step_ms
    assert short.decisions == whole.decisions
    assert len(entered) - entered.index("|") - 2 < entered.index("|"), entered


def test_where_no_layer_repeats_all_presets_are_simulated(monkeypatch):
    monkeypatch.setattr("stepgraph.contest.MANY", 10)
    contest, own, names = contest_of(planner_of(*chain(8, 16, 8)), "dp=2")
    assert promising(own, names, contest) == [Foreseen(name) for name in names]
    plan = planner_of(*chain(8, 16, 8)).plan(parse_mesh("dp=2"), "auto", "none").plan
    (note,) = [note for note in plan.notes if note.startswith("auto: ")]
    assert "the cheapest of 5" in note
