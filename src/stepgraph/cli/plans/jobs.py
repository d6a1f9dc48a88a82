"""Plans several meshes and placements, one capture a global batch, and leaves out what cannot fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from stepgraph.api.arguments import name_of
from stepgraph.api.models import find_model, language_model_loss
from stepgraph.api.plan import build_on_meta
from stepgraph.api.planner import Attempt, Planner, make_optimizer
from stepgraph.cost.devices import find_device
from stepgraph.errors import BudgetError
from stepgraph.memory.presets import budget_of
from stepgraph.placement.solver.held_bytes import first_limit
from stepgraph.planning.request import AUTO, Precision, StepSettings, is_searched
from stepgraph.planning.sizes import parse_size, show_bytes
from stepgraph.program.layout import MeshShape
from stepgraph.report.text import one_line

_ROOM = 2.0  # a step's peak over what it holds at least, where memory is no concern
_SURELY = 1.1  # of the limit: a peak by that of another mesh is about right


@dataclass(frozen=True)
class PlanOptions:
    """What ``stepgraph plan`` was asked for."""

    model: str
    mesh: tuple[str, ...]
    ranks: int | None = None
    device: str = "h100"
    batch_per_rank: int = 2
    seq: int = 8192
    plan: str = AUTO
    memory: str = AUTO
    memory_budget: str | None = None
    compare: str | None = None
    output: str | None = None
    html: str | None = None

    @property
    def refuses(self) -> bool:
        """Whether what does not fit is no answer: it was not asked for in so many words."""
        return is_searched(self.memory) or self.memory_budget is not None


@dataclass(frozen=True)
class Job:
    """One plan to be made."""

    mesh: MeshShape
    placement: str

    @property
    def size(self) -> int:
        """Data-parallel ranks: jobs of one size have one global batch, and one captured step."""
        return self.mesh.data_size


Refused = dict[str, tuple[int, MeshShape]]  # of a planner: what policies hold at least


class Desk:
    """Plans jobs of one model in this process; a step that is captured serves all jobs of its size.

    Args:
        options: what was asked for.
        stage: told what is going on.
    """

    def __init__(self, options: PlanOptions, stage: Callable[[str], None]) -> None:
        self._options, self._stage = options, stage
        self._device = find_device(options.device)
        self._model = build_on_meta(find_model(options.model))
        self._optimizer = make_optimizer("adamw", self._model)
        self._planners: dict[int, Planner] = {}
        self._refused: Refused = {}

    def try_to_plan(
        self, job: Job, last: bool, refused: Refused
    ) -> tuple[Attempt | BudgetError, Refused]:
        """One plan, with its prediction, or why nothing fits; and all that is known to be refused.

        Args:
            last: no other job of this size follows.
            refused: what others know.
        """
        options = self._options
        budget = budget_of(options.memory, parse_size(options.memory_budget))
        self._refused.update(refused)
        try:
            planner = self._planner(job.size)
            found = planner.plan(job.mesh, job.placement, options.memory, budget, last=last)
            return found, self._refused
        except BudgetError as error:
            return error, self._refused
        finally:
            if last:
                self._planners.pop(job.size, None)

    def whole_bytes(self, mesh: MeshShape) -> tuple[int, int]:
        """Bytes that all ranks of a mesh hold together at least: of states, and for the backward."""
        return self._planner(mesh.data_size).whole_bytes(mesh, self._options.memory)

    def _planner(self, size: int) -> Planner:
        if size not in self._planners:
            options = self._options
            shape = options.batch_per_rank * size, options.seq
            ids = torch.empty(shape, dtype=torch.int64, device="meta")
            optimizer = self._optimizer
            self._planners[size] = Planner(
                self._model,
                {"input_ids": ids, "labels": ids},
                language_model_loss,
                optimizer,
                self._device,
                StepSettings(name_of(optimizer), precision=Precision(torch.bfloat16)),
                stage=self._stage,
                refused=self._refused,
            )
        return self._planners[size]


class Worker(Protocol):
    """Who does one thing after the other. ``sizes``: those of which it has the captured step."""

    sizes: set[int]

    def measure(self, mesh: MeshShape) -> None:
        """Begins :meth:`Desk.whole_bytes`."""
        ...

    def begin(self, job: Job, last: bool, refused: Refused) -> None:
        """Begins :meth:`Desk.try_to_plan`."""
        ...

    def is_done(self, seconds: float) -> bool:
        """Whether what was begun is done, within so many seconds."""
        ...

    def result(self) -> Any:
        """What it came to; waits for it."""
        ...


class Here:
    """This process: what is begun is done when its result is asked for."""

    def __init__(self, options: PlanOptions, stage: Callable[[str], None]) -> None:
        self.sizes: set[int] = set()
        self._desk = Desk(options, stage)
        self.result: Callable[[], Any] = lambda: None

    def measure(self, mesh: MeshShape) -> None:
        """Begins :meth:`Desk.whole_bytes`."""
        self.result = partial(self._desk.whole_bytes, mesh)

    def begin(self, job: Job, last: bool, refused: Refused) -> None:
        """Begins :meth:`Desk.try_to_plan`."""
        self.result = partial(self._desk.try_to_plan, job, last, refused)

    def is_done(self, seconds: float) -> bool:
        """It will be."""
        return True


def run_jobs(
    options: PlanOptions, jobs: Sequence[Job], workers: Sequence[Worker], say: Callable[[str], None]
) -> list[Attempt]:
    """Plans jobs; says what each comes to once it is done.

    Meshes that were chosen here come most promising first, without those that cannot fit.

    Returns:
        what could be planned, in the order of the jobs.

    Raises:
        BudgetError: nothing fits anywhere.
    """
    board = _Board(options, list(jobs), say, len(jobs) > 1)
    if AUTO in options.mesh and len(jobs) > 1 and options.refuses:
        board.look_ahead(workers)
    busy: dict[int, Job] = {}
    while board.todo or busy:
        for number, worker in enumerate(workers):
            others = {size for other in workers if other is not worker for size in other.sizes}
            if number not in busy and (job := board.next_of(others)) is not None:
                worker.sizes.add(job.size)
                worker.begin(job, board.is_last(job), board.refused)
                busy[number] = job
        wait = 0.1 if len(busy) > 1 else 1.0
        for number in [n for n in busy if workers[n].is_done(wait)]:
            board.done(busy.pop(number), *workers[number].result())
    if not board.found:
        assert board.too_small is not None
        raise board.too_small
    return [board.found[job] for job in jobs if job in board.found]


@dataclass
class _Board:
    """What is still to be planned, and what came out."""

    options: PlanOptions
    todo: list[Job]
    say: Callable[[str], None]
    says_each: bool
    stored: int = 0
    found: dict[Job, Attempt] = field(default_factory=dict)
    refused: Refused = field(default_factory=dict)
    peaks: dict[Job, int] = field(default_factory=dict)
    too_small: BudgetError | None = None

    def __post_init__(self) -> None:
        options, capacity = self.options, find_device(self.options.device).capacity
        budget = budget_of(options.memory, parse_size(options.memory_budget))
        self.limit = first_limit(budget, capacity)

    def look_ahead(self, workers: Sequence[Worker]) -> None:
        """Orders jobs by what they hold at least, and leaves out what cannot fit.

        One step is captured for that; others who would wait begin with those of the next sizes.
        """
        meshes = {job.size: job.mesh for job in reversed(self.todo)}
        asked = list(zip(workers, sorted(meshes), strict=False))
        for worker, size in asked:
            worker.sizes.add(size)
            worker.measure(meshes[size])
        whole, *_ = (worker.result() for worker, _ in asked)
        smallest = meshes[min(meshes)]
        self.todo = most_promising_first(self.todo, smallest, whole, self.limit, self.say)
        self.stored = whole[0] // smallest.world_size

    def next_of(self, elsewhere: set[int]) -> Job | None:
        """The next job whose step nobody else has captured, without those that surely do not fit."""
        for job in [job for job in self.todo if job.size not in elsewhere]:
            self.todo.remove(job)
            peak = peak_like(self.peaks, job, self.stored) if self.stored else 0.0
            if peak <= _SURELY * self.limit:
                return job
            size = show_bytes(round(peak))
            what = f"left out: by the meshes above a rank would take {size}"
            self.done(job, BudgetError(what), {})
        return None

    def is_last(self, job: Job) -> bool:
        """Whether no other job of this size follows."""
        return all(other.size != job.size for other in self.todo)

    def done(self, job: Job, result: Attempt | BudgetError, refused: Refused) -> None:
        """A job is done."""
        self.refused.update(refused)
        if isinstance(result, BudgetError):
            self.too_small = result
            if result.smallest:
                self.peaks[job] = result.smallest
            self.say(f"{job.mesh}  {job.placement}: {result.what}")
            return
        self.found[job] = result
        if not is_searched(self.options.memory):  # else it takes what there is
            self.peaks[job] = result.peak
        if self.says_each:
            self.say(one_line(result.plan, result.fits))


def peak_like(known: Mapping[Job, int], job: Job, stored: int) -> float:
    """A peak by those of jobs of as many ranks; 0: there is none to go by.

    But for what is stored, a rank takes as much as it has rows.

    Args:
        known: peaks of what can be had with no less.
        stored: bytes of parameters and states of a rank.
    """
    alike = [(other, peak) for other, peak in known.items() if other.placement == job.placement]
    return max((stored + (peak - stored) * job.size / o.size for o, peak in alike), default=0.0)


def most_promising_first(
    jobs: Sequence[Job],
    known: MeshShape,
    whole: tuple[int, int],
    limit: int,
    say: Callable[[str], None],
) -> list[Job]:
    """Jobs without those that cannot fit, however their values are sharded; those with room first.

    Of these the ones with the least tensor parallelism, which communicates most; of the others those with
    most of it, which hold least.

    Args:
        known: a mesh, for which ``whole`` are the bytes of states, and for the backward, of all ranks.
        limit: bytes of a rank.
    """
    stored, kept = whole
    ranks = known.world_size
    least = {job: (stored + kept * job.size / known.data_size) / ranks for job in jobs}

    def order(job: Job) -> tuple[int, int]:
        tensor = ranks // job.size
        return (0, tensor) if _ROOM * least[job] <= limit else (1, -tensor)

    possible = [job for job in jobs if least[job] <= limit]
    for job in jobs if possible else ():
        if job not in possible:
            size = show_bytes(round(least[job]))
            say(f"{job.mesh}  {job.placement}: does not fit, it holds {size} a rank at least")
    return sorted(possible or jobs, key=order)
