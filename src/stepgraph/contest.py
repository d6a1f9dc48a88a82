"""``auto`` is never worse than a preset: presets are simulated too, and the best of all is taken.

A deep step takes as long to simulate as to capture. So a preset is simulated on two steps of few layers
first, which say what the whole takes (:mod:`stepgraph.cost.short_steps`). Where that is clearly more than
what is known to be possible, the whole is not simulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from stepgraph.cost.collectives import links
from stepgraph.cost.device import Device
from stepgraph.cost.memory import memory_timeline
from stepgraph.cost.predict import Prediction
from stepgraph.cost.short_steps import Said, short_steps
from stepgraph.errors import StepgraphError, UsageError
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.memory.decide import DIVIDED, WEIGHED, WHOLE, candidates
from stepgraph.memory.presets import budget_of
from stepgraph.pipeline import Made, foresee, form, in_order, make
from stepgraph.placement.decide import decide, reduces_each_micro_batch
from stepgraph.placement.presets.beside_data import BESIDE_DATA, SEQUENCE_PARALLEL
from stepgraph.placement.presets.data_parallel import PRESETS
from stepgraph.placement.presets.named import SharedWalks, check_preset
from stepgraph.placement.solver.constraints import Constraints
from stepgraph.planning.decisions import Decisions, PlacementDecision, Reason, Table
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import AUTO, Request, is_searched
from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape, Placements, show
from stepgraph.program.program import Program

MANY = 2500  # operations of a step that is simulated with fewer layers first
# What is foreseen to take so much more does take more.
_SURELY = 1.03
_KEEPS = "-keep"  # of presets: what is gathered for the forward is kept for the backward
_NORMS = 1.1  # norms on slices of the sequence make a step faster by less than this
_SAME = 1e-9  # a preset that differs by less is not taken


@dataclass(frozen=True)
class Contest:
    """What answers compete for: a request, the programs that it is about, and what they run on.

    ``logits``: how they are under a named memory policy. ``walks``: of each program, where it has its form
    already and presets place it one after the other. ``foreseen``: what short steps take under presets, by
    name and size; each is simulated once.
    """

    programs: Mapping[str, Program]
    plan: Plan
    target: Target
    device: Device
    rank: int = 0
    strict: bool = False
    logits: str = WEIGHED
    walks: Mapping[str, SharedWalks] | None = None
    foreseen: dict[tuple[str, int], Prediction | None] = field(default_factory=dict, repr=False)

    @property
    def budget(self) -> int:
        """Bytes of a rank, as predictions count them."""
        request = self.plan.request
        return request.counted(request.memory_budget or self.device.capacity)


@dataclass(frozen=True)
class Entrant:
    """One answer to a request, and what a step takes under it."""

    name: str
    made: Made
    predicted: Prediction


@dataclass(frozen=True)
class Foreseen:
    """A preset that may be the best, and what short steps say of the whole; None: nothing."""

    name: str
    said: Said | None = None

    @property
    def step_ms(self) -> float:
        """That a step takes; 0: it is not known."""
        return self.said.whole.step_ms if self.said else 0.0

    @property
    def least_ms(self) -> float:
        """That it takes at least."""
        return self.said.least_ms if self.said else 0.0


def make_best(
    programs: Mapping[str, Program],
    plan: Plan,
    target: Target,
    rank: int = 0,
    *,
    driver: PassDriver | None = None,
    strict: bool = False,
    logits: str = WEIGHED,
) -> Made:
    """:func:`stepgraph.pipeline.make`; where placements are searched for, the best of all answers.

    What a plan holds already is not decided again.
    """
    if is_searched(plan.memory) and plan.request.searches and not plan.decisions:
        plan = _placed(programs, plan, target, strict)
    made = make(programs, plan, target, rank, driver=driver, strict=strict, logits=logits)
    names = rivals(programs, plan)
    if not names:
        return made
    contest = Contest(programs, plan, target, plan.request.costs(), rank, strict, logits)
    own = Entrant(AUTO, made, predicted(made, contest.device))
    return taken(compete(own, names, contest), contest.budget).made


def room_of(request: Request) -> int:
    """The bytes of predictions that a rank has room for."""
    budget = budget_of(request.memory, request.memory_budget)
    return request.counted(budget or request.costs().capacity)


def _placed(programs: Mapping[str, Program], plan: Plan, target: Target, strict: bool) -> Plan:
    """A plan with the placements that are best where all is kept, or else where blocks are recomputed."""
    request = plan.request
    budget, most = budget_of(request.memory, request.memory_budget), room_of(request)
    found, fused = plan, LOWERINGS[request.lowering].fuses
    for policy in candidates(request.memory):
        asked = plan.under(memory=policy, memory_budget=budget)
        made = make_best(programs, asked, target, strict=strict, logits=WHOLE)
        decided = {
            key: replace(one, memory=None, schedule=None)
            for key, one in made.plan.decisions.items()
        }
        found = replace(made.plan, request=request, decisions=Table(decided))
        if max(memory_timeline(p, fused).peak() for p in made.programs.values()) <= most:
            break
    return found


def compete(own: Entrant, names: Sequence[str], contest: Contest) -> list[Entrant]:
    """A solver's answer, and those of the presets that may take less time than it."""
    if len(contest.programs["step"].graph.nodes) <= MANY:
        return [own, *(entrant for name in names for entrant in enter(name, contest))]
    entrants = [own]
    for foreseen in promising(own, names, contest):
        fitting = (e for e in entrants if e.predicted.peak_bytes <= contest.budget)
        best = min((e.predicted.step_ms for e in fitting), default=inf)
        if foreseen.least_ms <= best:
            entrants += enter(foreseen.name, contest)
    return entrants


def promising(own: Entrant, names: Sequence[str], contest: Contest) -> list[Foreseen]:
    """Presets with the ms that a step is foreseen to take by steps of few layers; the least first.

    Those that take more bytes than there are, and than a solver's answer, are left out. Where layers do not
    repeat, or a preset cannot place the short steps, nothing is foreseen: 0 ms.
    """
    found = short_steps(contest.programs)
    if found is None:
        return [Foreseen(name) for name in names]
    short, longer = (_short(contest, programs) for programs in found.programs)
    fits = own.predicted.peak_bytes <= contest.budget
    room = max(contest.budget, own.predicted.peak_bytes) * _SURELY
    hopeless = own.predicted.step_ms * _SURELY * _NORMS
    roomy: set[str] = set()
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}
    said: dict[str, Said] = {}
    wires = links(contest.plan.mesh, contest.device)
    for name in sorted(names, key=lambda name: not name.endswith(_KEEPS)):
        plain = name.replace(f"+{SEQUENCE_PARALLEL}", "", 1)
        if name + _KEEPS in roomy:  # it gathers twice what that one gathers once
            times[name] = times[name + _KEEPS]
            continue
        if plain != name and times.get(plain, 0.0) > hopeless:
            times[name] = times[plain]
            roomy |= {name} if plain in roomy else set()
            continue
        few, more = _foreseen(name, short), None
        if few is not None and few.peak_bytes > room:  # and layers add to it
            continue
        if few is not None:
            more = _foreseen(name, longer)
        times[name] = peaks[name] = 0.0
        if few is not None and more is not None:
            said[name] = found.say(few, more, wires)
            times[name], peaks[name] = said[name].whole.step_ms, said[name].whole.peak_bytes
            if peaks[name] * _SURELY <= contest.budget:
                roomy.add(name)
    if fits or roomy & peaks.keys():  # nothing larger is asked for
        room = contest.budget * _SURELY
    kept = [Foreseen(name, said.get(name)) for name, peak in peaks.items() if peak <= room]
    return sorted(kept, key=lambda foreseen: foreseen.step_ms)


def _short(contest: Contest, programs: Mapping[str, Program]) -> Contest:
    """The same of other programs, which presets place together."""
    # All presets want programs in the same form.
    plan, driver = contest.plan.under(placement=next(iter(PRESETS))), PassDriver()
    formed = {name: form(program, plan, driver) for name, program in in_order(programs)}
    logits = DIVIDED if contest.logits == WEIGHED else contest.logits
    return replace(contest, programs=formed, walks={name: {} for name in formed}, logits=logits)


def rivals(programs: Mapping[str, Program], plan: Plan) -> list[str]:
    """Presets that are simulated beside a solver's answer; none where there is nothing to search.

    Those that reduce gradients for every micro-batch are captured otherwise, and left out.
    """
    request = plan.request
    searched = request.searches and not plan.decisions
    if not searched or "step" not in programs or request.mesh.world_size == 1:
        return []
    found = []
    for name in _names(request.mesh):
        try:
            check_preset(name, request.mesh)
        except UsageError:
            continue
        if request.step.micro_batches == 1 or not reduces_each_micro_batch(name, request.mesh):
            found.append(name)
    return found


def _names(mesh: MeshShape) -> list[str]:
    """Presets of the data-parallel dimensions, with each way along those beside them."""
    beside = [kind.words for role, kind in BESIDE_DATA.items() if role in mesh.roles]
    ways = (
        [""] if not beside else ["+".join(words[:n]) for words in beside for n in (1, len(words))]
    )
    # zero2 is zero1 but for micro-batches, and then it reduces for each of them.
    data = (
        [n for n in PRESETS if n != "zero2"]
        if any(role.divides_batch for role in mesh.roles)
        else [""]
    )
    return ["+".join(filter(None, (way, name))) for way in dict.fromkeys(ways) for name in data]


def enter(name: str, contest: Contest) -> list[Entrant]:
    """A preset's answer to a request; none where it cannot place a program."""
    made = _made(name, contest, with_facts=True)
    return [] if made is None else [Entrant(name, made, predicted(made, contest.device))]


def _foreseen(name: str, contest: Contest) -> Prediction | None:
    """What a step takes under a preset's answer, which is not needed itself."""
    key = name, len(contest.programs["step"].graph.nodes)
    if key not in contest.foreseen:
        made = _made(name, contest, with_facts=False)
        contest.foreseen[key] = made and predicted(made, contest.device, keep=False)
    return contest.foreseen[key]


def _made(name: str, contest: Contest, with_facts: bool) -> Made | None:
    plan, programs = contest.plan, contest.programs
    preset = replace(plan, request=replace(plan.request, placement=name))
    try:
        for key, shared in (contest.walks or {}).items():
            known = preset.inputs()
            where = decide(programs[key], plan.mesh, name, known_inputs=known, shared=shared)
            preset = preset.with_decisions(key, Decisions(where))
        made = make(
            programs, preset, contest.target, contest.rank,
            with_facts=with_facts, strict=contest.strict, logits=contest.logits,
        )  # fmt: skip
    except StepgraphError:
        return None
    if plan.request.constraints and not _is_as_asked(made, programs, plan):
        return None
    made.plan = replace(made.plan, request=plan.request)
    return made


def _is_as_asked(made: Made, programs: Mapping[str, Program], plan: Plan) -> bool:
    """Whether what was made without constraints satisfies them."""
    mesh, asked = plan.mesh, plan.request.constraints
    try:
        return all(
            Constraints(asked, program, mesh, {}).admits(made.decided[name].placement)
            for name, program in programs.items()
        )
    except UsageError:  # of a value that only the solver's form of the program has
        return False


def predicted(made: Made, device: Device, keep: bool = True) -> Prediction:
    """What a step takes under an answer.

    Args:
        keep: its programs are needed again.
    """
    request = made.plan.request
    return foresee(made.programs, device, request.lowering, request.step.micro_batches, keep)


def taken(entrants: Sequence[Entrant], budget: int) -> Entrant:
    """Of answers, the solver's first, the one that takes least time of those that fit.

    Its plan says what others take.

    Args:
        budget: bytes of a rank; where nothing fits, the smallest peak counts.
    """
    own, ranked = entrants[0], in_rank(entrants, budget)
    best = ranked[0]
    if len(ranked) == 1:
        return best
    plan = best.made.plan
    shown = ", ".join(
        f"{'its own' if e is own else e.name} {e.predicted.step_ms:.4g} ms" for e in ranked[:4]
    )
    of = "its own placements" if best is own else f"those of the preset {best.name}"
    note = f"auto: {of}, the cheapest of {len(ranked)} that were simulated ({shown})"
    decisions = plan.decisions
    if best is not own:
        decisions = Table({key: _with_reasons(key, d, best, own) for key, d in decisions.items()})
    best.made.plan = replace(plan, decisions=decisions, notes=(*plan.notes, note))
    return best


def in_rank(entrants: Sequence[Entrant], budget: int) -> list[Entrant]:
    """The best first; as :func:`taken` has it."""

    def rank(entrant: Entrant) -> tuple[int, float]:
        handicap = 1 + _SAME * (entrant is not entrants[0])
        over = max(0, entrant.predicted.peak_bytes - budget)
        return over, entrant.predicted.step_ms * handicap

    return sorted(entrants, key=rank)


def _with_reasons(key: str, decided: Decisions, best: Entrant, own: Entrant) -> Decisions:
    """A preset's decisions, with what a solver would have chosen where that is something else.

    Both were chosen as a whole, so each costs what a whole step costs.
    """
    other = own.made.plan.decisions[key].placement
    theirs = _lives(other)
    reasons = {
        name: Reason(text, best.predicted.step_ms, theirs[name], own.predicted.step_ms)
        for name, text in _lives(decided.placement).items()
        if theirs.get(name, text) != text and own.predicted.step_ms >= best.predicted.step_ms
    }
    return replace(decided, placement=replace(decided.placement, reasons=reasons))


def _lives(decision: PlacementDecision) -> dict[str, str]:
    """Where parameters are stored and results of operations are, as text."""
    placed: dict[str, Placements | None] = {n: o.outputs[0] for n, o in decision.operations.items()}
    placed |= {name: p for name, p in decision.inputs.items() if name.startswith("Param(")}
    return {name: show(p) for name, p in placed.items() if p is not None}
