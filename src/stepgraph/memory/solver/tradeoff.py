"""One block: which of its values are best kept, seconds of recomputation against bytes.

A small integer program, which is the minimum cut of torch's partitioner (``min_cut_rematerialization``)
with the time of what is computed again in its objective: a value that the backward needs is kept, or
computed again of values that are there; what is kept takes at most so many bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from stepgraph.cost.work import size_in_bytes
from stepgraph.memory.saved import is_behind, storage_of
from stepgraph.operators.views import viewed
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta

_EXACT = 1e-9  # of the objective: a smaller gap is not looked for
_PER_BYTE = 1e-6  # of all time for all bytes: of what takes as long, that which keeps less


@dataclass(frozen=True)
class Kept:
    """What a block keeps, and what it computes again.

    Attributes:
        nodes: of what may go, what is kept; None: all is.
        again: what the backward computes again.
        seconds: that takes.
        bytes: of the forward that wait for the backward.
    """

    nodes: frozenset[fx.Node] | None
    again: frozenset[fx.Node]
    seconds: float
    bytes: int


@dataclass
class Tradeoff:
    """The choices of one block.

    Args:
        block: its operations, in order.
        droppable: those that may be computed again.
        free: what is there in the backward in any case.
        seconds: of each operation.
        communicates: what other blocks communicated is communicated again, of what they kept.
    """

    block: Sequence[fx.Node]
    droppable: set[fx.Node]
    free: set[fx.Node]
    seconds: Mapping[fx.Node, float]
    communicates: bool = False
    storages: dict[fx.Node, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        inside = {*self.block}
        self.droppable = self.droppable - self.free
        sources = [s for node in self.block for s in node.all_input_nodes if s not in inside]
        self.values = [*dict.fromkeys(sources), *self.block]
        self.storages = {node: storage_of(node) for node in self.values}
        for node, storage in self.storages.items() if self.communicates else ():
            if node not in inside and is_collective(storage):
                self.storages[node] = storage_of(storage.all_input_nodes[0])
        self.read = {node for node in self.values if any(map(is_behind, node.users))}
        self._inside = inside
        self.choices = self._choices()

    def measure(self, kept: frozenset[fx.Node] | None) -> Kept:
        """What it comes to if of what may go only these are kept; None: all is."""
        dropped = set() if kept is None else self.droppable - kept
        again, stack = set(), [node for node in self.read if node in dropped]
        while stack:
            node = stack.pop()
            if node not in again:
                again.add(node)
                stack += [source for source in node.all_input_nodes if source in dropped]
        needed = {node for node in self.read if node not in dropped}
        needed |= {source for node in again for source in node.all_input_nodes} - dropped
        held = {self.storages[node] for node in needed if not self._is_free(node)}
        size = sum(self._bytes(storage) for storage in held)
        seconds = math.fsum(self.seconds[node] for node in again)  # in whatever order
        return Kept(kept, frozenset(again), seconds, size)

    def least_seconds(self, most_bytes: float) -> Kept | None:
        """Within so many bytes; None where that cannot be."""
        return self._solve(most_bytes, of_bytes=False)

    def least_bytes(self) -> Kept:
        """However long it takes."""
        found = self._solve(np.inf, of_bytes=True)
        assert found is not None, "all that may go can go"
        return found

    def _choices(self) -> list[fx.Node]:
        """Operations whose results may be kept, instead of being computed again for the backward."""
        again = self.measure(frozenset()).again
        return [
            node
            for node in self.block
            if node in again and self.storages[node] is node and not _is_tuple(node)
        ]

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a value, or what it shows, is there in any case."""
        storage = self.storages[node]
        return node in self.free or storage in self.free or storage.op != "call_function"

    def _bytes(self, storage: fx.Node) -> int:
        """Of a storage that is kept; nothing for one from elsewhere that the backward reads in any case."""
        counted = storage in self._inside or not _is_read_behind(storage)
        return size_in_bytes(meta(storage)["val"]) if counted else 0

    def _solve(self, most_bytes: float, of_bytes: bool) -> Kept | None:
        keep: dict[fx.Node, int] = {}
        again: dict[fx.Node, int] = {}
        kept = (node for node in self.values if not self._is_free(node))
        for storage in map(self.storages.__getitem__, kept):
            if not _is_tuple(storage):
                keep.setdefault(storage, len(keep))
        for node in self.block:
            if node in self.droppable:
                again[node] = len(keep) + len(again)
        rows = [
            row
            for node in self.values
            if node in self.read
            for row in self._needed(node, None, keep, again)
        ]
        for node in again:
            for source in node.all_input_nodes:
                rows += self._needed(source, node, keep, again)
        size = np.array([self._bytes(storage) for storage in keep], float)
        scale = max(size.sum(), 1.0)
        time = np.array([self.seconds[node] for node in again])
        time = time / max(time.sum(), 1e-12)
        price = size / scale if of_bytes else _PER_BYTE * size / scale
        costs = np.concatenate([price, _PER_BYTE * time if of_bytes else time])
        budget = (dict(enumerate(size / scale)), -np.inf, min(most_bytes / scale, 1e9))
        values = minimise(costs, [*rows, budget])
        if values is None:
            return None
        taken = frozenset(s for s, column in keep.items() if values[column] > 0.5)
        return self.measure(
            frozenset(node for node in self.droppable if self.storages[node] in taken)
        )

    def _needed(
        self,
        value: fx.Node,
        reader: fx.Node | None,
        keep: Mapping[fx.Node, int],
        again: Mapping[fx.Node, int],
    ) -> list[tuple[dict[int, float], float, float]]:
        """Where a reader runs again, a value is there; without one, the backward itself reads it."""
        if self._is_free(value):
            return []
        row: dict[int, float] = {}
        if (storage := self.storages[value]) in keep:
            row[keep[storage]] = 1.0
        if value in again:
            row[again[value]] = 1.0
        if reader is None:
            return [(row, 1.0, np.inf)]
        row[again[reader]] = row.get(again[reader], 0.0) - 1.0
        return [(row, 0.0, np.inf)]


def minimise(
    costs: np.ndarray, rows: Sequence[tuple[Mapping[int, float], float, float]]
) -> np.ndarray | None:
    """The binary values of least cost within rows: (coefficients, lower, upper); None: there are none."""
    import highspy  # here, for not every run has a budget, and it takes 3 MiB and 10 ms

    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_rel_gap", _EXACT)
    highs.setOptionValue("mip_abs_gap", _EXACT)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(rows)
    lp.col_cost_ = costs
    lp.col_lower_, lp.col_upper_ = np.zeros(len(costs)), np.ones(len(costs))
    lp.row_lower_ = np.array([max(lower, -highspy.kHighsInf) for _, lower, _ in rows])
    lp.row_upper_ = np.array([min(upper, highspy.kHighsInf) for _, _, upper in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    starts = np.cumsum([0, *(len(row) for row, _, _ in rows)])
    lp.a_matrix_.start_ = starts.astype(np.int32)
    lp.a_matrix_.index_ = np.array([c for row, _, _ in rows for c in row], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for row, _, _ in rows for v in row.values()], dtype=float)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(costs)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return np.asarray(highs.getSolution().col_value)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(meta(node).get("val"), (tuple, list))


def _is_read_behind(node: fx.Node) -> bool:
    """Whether the backward reads a value, or a view of it."""
    return any(is_behind(u) or (viewed(u) is node and _is_read_behind(u)) for u in node.users)
