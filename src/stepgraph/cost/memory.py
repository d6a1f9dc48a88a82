"""Memory of a Program over time: which storage lives when, by category.

A storage is born with the operation that allocates it and dies with the last reader of it or of any view
of it, as in the Python that fx generates; what a collective sends is held until its wait (an all-reduce
sends a copy, its result). Inputs live throughout; a ``New*`` result written over an input costs nothing
beyond it. Bytes are this rank's. What waits on the host is counted apart, also where the device is that.
"""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.registers import Registers, find_registers, piece_of
from stepgraph.cost.work import size_in_bytes, workspace
from stepgraph.operators.views import viewed
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import is_on_host
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, OPTIMIZER, Program, is_write, tensors_of
from stepgraph.torch_internals.code import inputs_of

CATEGORIES = (
    "parameters", "gradients", "optimizer", "inputs", "activations", "temporaries", "communication",
)  # fmt: skip

ON_HOST = "on the host"  # what was offloaded: memory of the host, whatever the device

# One of the storages that an operation allocated: (operation, which of its results).
Storage = tuple[fx.Node, int]


@dataclass
class MemoryTimeline:
    """Bytes alive after each operation, in graph order.

    ``at[i]`` are the bytes by category while operation ``i`` runs, its result included. In none of those
    are ``waiting[i]``, which wait in the host's memory, and ``copied[i]``, of what gloo copies meanwhile.
    """

    operations: list[fx.Node]
    at: list[dict[str, int]]
    waiting: list[int]
    copied: list[int]

    @property
    def on_host(self) -> int:
        """Most bytes that wait in the host's memory at once."""
        return max(self.waiting, default=0)

    @property
    def resident(self) -> int:
        """Most bytes at once where the device is the host, and its ranks communicate through gloo."""
        beside = map(sum, zip(self.waiting, self.copied, strict=True))
        return max(
            (sum(now.values()) + b for now, b in zip(self.at, beside, strict=True)), default=0
        )

    def peak(self, phase: str | None = None, without: tuple[str, ...] = ()) -> int:
        """Largest number of bytes alive at once, in one phase, without some categories."""
        totals = [
            sum(alive.values()) - sum(alive.get(category, 0) for category in without)
            for node, alive in zip(self.operations, self.at, strict=True)
            if phase is None or phase == meta(node)["phase"]
        ]
        return max(totals, default=0)

    def peak_of(self, category: str) -> int:
        """Largest number of bytes of one category alive at once."""
        return max((alive.get(category, 0) for alive in self.at), default=0)


def memory_timeline(program: Program, fused: bool = False) -> MemoryTimeline:
    """Simulates the Program in graph order; linear in its size.

    Args:
        fused: by a lowering that makes one kernel of several operations: some values are in no memory.
    """
    lives = _Lives(program, find_registers(program) if fused else Registers())
    end = len(lives.operations)
    over = {old: lives.position[new] for new, old in lives.registers.over.items()}
    born: list[list[tuple[str, int]]] = [[] for _ in range(end + 1)]
    dead: list[list[tuple[str, int]]] = [[] for _ in range(end + 1)]
    for node in lives.operations:
        start = lives.position[node]
        for storage in lives.allocated(node):
            last = lives.last_use.get(storage, start)
            entry = (lives.category(storage, last), _bytes_of(storage))
            born[start].append(entry)
            if node in over:  # it ends where the next begins
                last = min(last, over[node] - 1)
            dead[min(last + 1, end)].append(entry)
    for (_, node), made in lives.registers.anew.items():
        if made.in_memory:
            entry = ("temporaries", _bytes_of((node, 0)))
            born[made.begin].append(entry)
            dead[made.end + 1].append(entry)
    alive: dict[str, int] = dict.fromkeys((*CATEGORIES, ON_HOST), 0)
    for role, node, _ in program.input_rows:
        category = ON_HOST if is_on_host(node) else _input_category(role)
        alive[category] += size_in_bytes(meta(node).get("val"))
    for node in program.graph.nodes:
        if node.op == "get_attr":  # a constant of the graph
            alive["inputs"] += size_in_bytes(meta(node).get("val"))
    at, waiting = [], []
    for i in range(end):
        for category, size in dead[i]:
            alive[category] -= size
        for category, size in born[i]:
            alive[category] += size
        inside = workspace(lives.operations[i])
        now = {**alive, "temporaries": alive["temporaries"] + inside}
        waiting.append(now.pop(ON_HOST))
        at.append(now)
    return MemoryTimeline(lives.operations, at, waiting, _copied(lives))


class _Lives:
    """Until which operation each storage of a Program is needed."""

    def __init__(self, program: Program, registers: Registers) -> None:
        self.program, self.registers = program, registers
        self.operations = list(program.operations())
        self.position = {node: i for i, node in enumerate(self.operations)}
        self.storages: dict[fx.Node, tuple[Storage, ...]] = {}
        for node in program.graph.nodes:
            self.storages[node] = self._storages_of(node)
        self.last_use: dict[Storage, int] = {}
        for node in self.operations:
            only_shown = registers.anew and viewed(node) and "piece" not in meta(node)
            if not only_shown:  # else who reads the view reads it
                self._reads(node, piece_of(node), registers.until.get(node, self.position[node]))
            if is_collective(node) and node.target is not torch_internals.ALL_REDUCE:
                for wait in node.users:
                    self._needed(node.all_input_nodes[0], self.position.get(wait, 0))
        for (piece, node), made in registers.anew.items():
            self._reads(node, piece, made.until)
        self._hold_results()
        self.gradients = self._gradients()

    def allocated(self, node: fx.Node) -> Iterator[Storage]:
        """The storages that an operation makes."""
        if not is_write(node) and node not in self.registers.until:
            for storage in self.storages[node]:
                if storage[0] is node:
                    yield storage

    def category(self, storage: Storage, last: int) -> str:
        """What a storage is for, given its last use."""
        node, _ = storage
        if storage in self.gradients:
            return "gradients"
        if is_collective(node):
            return "communication"
        if is_on_host(node):
            return ON_HOST
        last_reader = self.operations[min(last, len(self.operations) - 1)]
        if meta(node)["phase"] == FORWARD and meta(last_reader)["phase"] != FORWARD:
            return "activations"
        return "temporaries"

    def _storages_of(self, node: fx.Node) -> tuple[Storage, ...]:
        source = viewed(node)
        if source is None:
            value = meta(node).get("val")
            count = 1 if isinstance(value, torch.Tensor) else max(len(tensors_of(value)), 1)
            return tuple((node, i) for i in range(count))
        if node.target is operator.getitem and viewed(source) is None:
            made = meta(source).get("val")
            if isinstance(made, (tuple, list)):
                before = sum(len(tensors_of(part)) for part in made[: node.args[1]])  # type: ignore[index,misc]
                count = len(tensors_of(meta(node)["val"]))
                return tuple((source, before + i) for i in range(count))
        return self.storages[source]

    def _reads(self, node: fx.Node, piece: int, until: int) -> None:
        """An operation in a piece reads what that does not compute for itself."""
        anew = self.registers.anew
        for source in inputs_of(node):
            for storage in self.storages[source]:
                made = storage[0]
                if not anew or (piece, made) not in anew or piece == piece_of(made):
                    self.last_use[storage] = max(self.last_use.get(storage, 0), until)

    def _needed(self, node: fx.Node, until: int) -> None:
        for storage in self.storages[node]:
            self.last_use[storage] = max(self.last_use.get(storage, 0), until)

    def _hold_results(self) -> None:
        """Results live to the end, but for those that are written in place right behind their producer."""
        inputs = {role: node for role, node, _ in self.program.input_rows}
        for role, node, _ in self.program.output_rows:
            written = roles.written_input(role)
            if written not in inputs:
                self._needed(node, len(self.operations))
                continue
            old_value = self.last_use.get((inputs[written], 0), 0)  # type: ignore[index]
            self._needed(node, max(old_value, self.position.get(node, 0)))

    def _gradients(self) -> set[Storage]:
        """Storages that cross from the backward into the update, or leave as gradients."""
        results = self.program.gradients.values()
        found = {storage for node in results for storage in self.storages[node]}
        for node in self.program.operations(BACKWARD):
            if any(u.op == "call_function" and meta(u)["phase"] == OPTIMIZER for u in node.users):
                found.update(self.storages[node])
        return found


def _copied(lives: _Lives) -> list[int]:
    """Bytes of what gloo copies during each operation: all that it gathers, or scatters sums of."""
    more = [0] * (len(lives.operations) + 1)
    for node in lives.operations:
        if node.target in (torch_internals.ALL_GATHER, torch_internals.REDUCE_SCATTER):
            sent = meta(node.all_input_nodes[0])["val"]
            size = max(size_in_bytes(sent), size_in_bytes(meta(node)["val"]))
            start = lives.position[node]
            more[start] += size
            ends = (lives.position.get(user, start) for user in node.users)  # its wait
            more[max(ends, default=start) + 1] -= size
    return list(itertools.accumulate(more))[:-1]


def _input_category(role: roles.Input) -> str:
    match role:
        case roles.Param() | roles.Buffer() | roles.Outside():
            return "parameters"
        case roles.OptimizerState() | roles.Scalar():
            return "optimizer"
        case roles.Accumulator():
            return "gradients"
    return "inputs"


def _bytes_of(storage: Storage) -> int:
    node, index = storage
    made = tensors_of(meta(node).get("val"))
    return size_in_bytes(made[index]) if made else 0
