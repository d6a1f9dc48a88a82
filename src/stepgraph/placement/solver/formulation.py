"""The optimisation behind ``auto`` as an integer program.

One variable per option, and for each link the flow from made placements to wanted ones, reader by reader;
what flows along a change must have been paid. Given whole options the flows are whole by themselves.
"""

import highspy
import numpy as np

from stepgraph.placement.solver.choices import (
    BACKWARD,
    FORWARD,
    Block,
    Link,
    Phases,
    Problem,
    Reader,
)

# A limit that is itself an estimate may be exceeded, where each part of it that is taken more saves several
# times that part of the least that all could cost.
_PRICE = 5.0
_NOTABLE = 1e-3  # part of the memory limit: what a block takes less while it runs is not looked at


class SparseProgram:
    """Columns and rows of an integer program, collected as sparse arrays."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.most: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # row, column, value

    def row(self, lower: float, upper: float) -> int:
        """A new row between two bounds; its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.lower) - 1

    def column(self, cost: float, most: float = 1.0) -> int:
        """All are between 0 and ``most``: flows are so by themselves, but presolve may not end untold."""
        self.costs.append(cost)
        self.most.append(most)
        return len(self.costs) - 1

    def put(self, row: int, column: int, value: float) -> None:
        """An entry; one at each place."""
        self.entries.append((row, column, value))

    def pass_to(self, highs: highspy.Highs, whole: int) -> None:
        """Hands everything over; the first ``whole`` columns are integral."""
        lp = highspy.HighsLp()
        columns, rows = len(self.costs), len(self.lower)
        lp.num_col_, lp.num_row_ = columns, rows
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_ = np.zeros(columns)
        lp.col_upper_ = np.array(self.most)
        lp.row_lower_, lp.row_upper_ = np.array(self.lower), np.array(self.upper)
        table = np.array(self.entries).reshape(-1, 3)
        order = np.lexsort((table[:, 0], table[:, 1]))
        table = table[order]
        counts = np.bincount(table[:, 1].astype(int), minlength=columns)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lp.a_matrix_.index_ = table[:, 0].astype(np.int32)
        lp.a_matrix_.value_ = table[:, 2]
        kinds = [highspy.HighsVarType.kInteger] * whole
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (columns - whole)
        highs.passModel(lp)


class Formulation:
    """The program of a problem.

    Its first ``options`` columns are the options; ``blocks`` are (first column, how many). Costs are times
    ``scale``.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.scale = 1.0 / max(1e-12, sum(float(b.cost.min()) for b in problem.blocks) or 1.0)
        self.program = SparseProgram()
        self.limit: int | None = None
        self.most: int | None = None  # column: what the largest step takes while it runs
        self.over = -1  # column: what is taken beyond the limit, by default nothing
        self.unit = max(1.0, problem.memory_limit or problem.most_running())  # bytes
        self.first: dict[Block, int] = {}
        self._build()

    def _build(self) -> None:
        problem, program = self.problem, self.program
        for block in problem.blocks:
            self.first[block] = len(program.costs)
            one = program.row(1.0, 1.0)
            for cost in block.cost:
                program.put(one, program.column(float(cost) * self.scale), 1.0)
        self.options = len(program.costs)
        self.blocks = [(self.first[block], len(block.cost)) for block in problem.blocks]
        infinity = highspy.kHighsInf
        if problem.memory_limit is not None or problem.running_cost:
            self._count_what_runs()
        if problem.memory_limit is not None:
            self._limit_memory(problem.memory_limit)
        # The step is longer by what no later work hides, seen from whatever moment.
        moments = max((len(x.later) for x in problem.links if x.later is not None), default=0)
        self.beside = [program.row(0.0, infinity) for _ in range(moments)]
        longer = program.column(1.0, infinity)
        for row in self.beside:
            program.put(row, longer, 1.0)
        for block in problem.blocks:
            if block.later is not None and moments:
                for option, cost in enumerate(block.cost):
                    self._lengthen(self.first[block] + option, -float(cost) * block.later)
        for link in problem.links:
            if len(link.readers) == 1:
                self._flow(link, link.readers[0], None)
                continue
            paid: dict[tuple, int] = {}
            for reader in link.readers:
                self._flow(link, reader, paid)
        if self.limit is not None:
            self.over = program.column(_PRICE, 0.0)
            program.put(self.limit, self.over, -1.0)

    def _count_what_runs(self) -> None:
        """A column that is no less than what any block takes while it runs; links add theirs."""
        program = self.program
        price = self.problem.running_cost * self.unit * self.scale
        self.most = program.column(price, highspy.kHighsInf)
        for block in self.problem.blocks:
            if block.temporary is None or block.temporary.max(initial=0.0) < _NOTABLE * self.unit:
                continue
            row = program.row(0.0, highspy.kHighsInf)
            program.put(row, self.most, 1.0)
            for option in np.flatnonzero(block.temporary):
                column = self.first[block] + int(option)
                program.put(row, column, -float(block.temporary[option]) / self.unit)

    def _limit_memory(self, limit: float) -> None:
        assert self.most is not None
        self.limit = self.program.row(-highspy.kHighsInf, limit / self.unit)
        self.program.put(self.limit, self.most, 1.0)
        for block in self.problem.blocks:
            if block.memory is not None:
                for option in np.flatnonzero(block.memory):
                    column = self.first[block] + int(option)
                    self.program.put(self.limit, column, float(block.memory[option]) / self.unit)

    def _flow(self, link: Link, reader: Reader, paid: dict[tuple, int] | None) -> None:
        """What one reader takes: from each made placement into each wanted one."""
        program = self.program
        made: dict[int, int] = {}
        wanted: dict[int, int] = {}
        for rows, indices, block in (
            (made, link.makes, link.producer), (wanted, reader.wants, reader.block)
        ):  # fmt: skip
            for option, index in enumerate(indices):
                if int(index) not in rows:
                    rows[int(index)] = program.row(0.0, 0.0)
                program.put(rows[int(index)], self.first[block] + option, -1.0)
        runs: int | None = None
        for p, made_row in made.items():
            for q, wanted_row in wanted.items():
                cost = link.cost_of(p, *_alone(q, reader.phases))
                if not np.isfinite(cost):
                    continue
                column = program.column(0.0)
                program.put(made_row, column, 1.0)
                program.put(wanted_row, column, 1.0)
                if self.most is not None and link.temporary is not None:
                    running = float(link.temporary[p, q]) / self.unit
                    if running > _NOTABLE:
                        if runs is None:
                            runs = program.row(0.0, highspy.kHighsInf)
                            program.put(runs, self.most, 1.0)
                        program.put(runs, column, -running)
                once, again = float(link.once[p, q]), float(link.again[p, q])
                if paid is None or not cost:
                    self._charge(link, (p, q), column, cost, once=True)
                    continue
                parts = [(None, once), *((phase, again) for phase in reader.phases)]
                for phase, part in parts:
                    if not part:
                        continue
                    key = (p, q, phase)
                    if key not in paid:
                        paid[key] = program.column(0.0)
                        self._charge(link, (p, q), paid[key], part, once=phase is None)
                    covered = program.row(0.0, highspy.kHighsInf)
                    program.put(covered, paid[key], 1.0)
                    program.put(covered, column, -1.0)

    def _charge(
        self, link: Link, change: tuple[int, int], column: int, cost: float, once: bool
    ) -> None:
        if not once:
            self.program.costs[column] = cost * self.scale
            return
        kept = float(link.kept[change]) if link.kept is not None else 0.0
        if self.limit is not None and kept:
            self.program.put(self.limit, column, kept / self.unit)
        runs, longer = link.beside(change[0], (change[1],))
        self.program.costs[column] = (cost - runs) * self.scale
        if link.later is not None:
            self._lengthen(column, longer)

    def _lengthen(self, column: int, seconds: np.ndarray) -> None:
        """A column adds to what is left to do beside other work after each moment."""
        for row, part in zip(self.beside, seconds, strict=True):
            if part:
                self.program.put(row, column, -float(part) * self.scale)


def _alone(q: int, phases: Phases) -> tuple[tuple[int, ...], ...]:
    """The placements wanted in the forward and in the backward, if it is this one alone."""
    return tuple((q,) if phase in phases else () for phase in (FORWARD, BACKWARD))
