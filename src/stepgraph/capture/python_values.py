"""Values that model code reads from Python and changes there: a captured program holds them as constants.

What was read is compared at every call, and what the code changes is changed after every run of the
program: a counter that only counts is counted on, anything else is set to what the code leaves. What
cannot be had so runs graph by graph, or is an error: never the first step's value for ever.
"""

import dis
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from stepgraph.capture.outside_tensors import OutsideTensor
from stepgraph.errors import CaptureError, GraphBreakError
from stepgraph.torch_internals.python_changes import Change
from stepgraph.torch_internals.python_values import Heard, Reads
from stepgraph.torch_internals.words import Snapshot

# Between the load of a counter and the store of what it has become.
_COUNTING = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "BINARY_OP", "SWAP", "CACHE"}


@dataclass(frozen=True)
class PythonValues:
    """What one capture read and what a run of its code changes; ``reads``: None where nobody compares.

    ``tensors``: those from outside, which its program takes as inputs.
    """

    reads: Reads | None = None
    changes: tuple[Callable[[], None], ...] = ()
    tensors: tuple[OutsideTensor, ...] = ()

    def untouched(self) -> bool:
        """Whether nothing was written to since all was found to be what it was; takes microseconds.

        False where that cannot be known: then :meth:`hold` says, while the model is as it was captured.
        """
        return self.reads is None or (self.reads.untouched() and self._has_tensors())

    def snapshot(self) -> Snapshot | None:
        """What would have to be written to for anything to be another; None: it has to be looked for."""
        if self.tensors:
            return None
        return Snapshot() if self.reads is None else self.reads.snapshot()

    def hold(self) -> bool:
        """Whether everything that was read is what it was."""
        return self.reads is None or (self._has_tensors() and self.reads.hold())

    def remember(self) -> None:
        """Everything is what it was, and the model as it is between calls."""
        if self.reads is not None:
            self.reads.remember()

    def _has_tensors(self) -> bool:
        return not any(one.broken() for one in self.tensors)

    def broken(self) -> str:
        """The first that is not."""
        found = next(filter(None, (one.broken() for one in self.tensors)), "")
        return found or ("" if self.reads is None else self.reads.broken())

    def replay(self) -> None:
        """Changes what one run of the forward changes."""
        for change in self.changes:
            change()


def values_of(heard: Heard, compare: bool, micro_batches: int = 1) -> PythonValues:
    """What to do about the Python values of a capture; called while those of the capture still stand.

    Args:
        compare: they will be compared from call to call.
        micro_batches: forwards of one step.

    Raises:
        GraphBreakError: the code keeps tensors from one call for the next, or an object that it makes; or
            it changes what can be changed by nobody else.
        CaptureError: it changes a value that it reads, from micro-batch to micro-batch; the order of an
            ordered dictionary; or a deque that holds at most so many.
    """
    if reordering := next((code for code in heard.codes if "move_to_end" in code.co_names), None):
        where = f"{reordering.co_filename}:{reordering.co_firstlineno}"
        raise CaptureError(
            f"the forward reorders an ordered dictionary ({reordering.co_qualname}, {where})",
            why="torch's tracing forgets move_to_end: every step would find the order of the first",
            do="do it outside the forward, or keep the order in a list",
        )
    replayed: list[Callable[[], None]] = []
    counters: set[str] = set()
    for change in heard.changes:
        if isinstance(change.holder, deque) and change.holder.maxlen is not None:
            raise CaptureError(
                f"the forward changes {change.path}, a deque that holds at most {change.holder.maxlen}",
                why="torch's tracing forgets how many, so that its length and its first items are others",
                do="do it outside the forward, or keep a list and cut it",
            )
        if change.holds_numbers:
            raise GraphBreakError(
                f"the forward keeps a number that it read from a tensor in {change.path}",
                why="a captured step reads no tensor, and would leave what was there at first",
                do="keep it as a buffer (register_buffer) that the forward writes in place",
            )
        if not change.is_constant:
            if change.was_read and change.holds_tensors:
                raise GraphBreakError(
                    f"the forward keeps tensors in {change.path} for its next call",
                    why="a captured step has the value that was there at first",
                    do="make it a buffer (register_buffer) that the forward writes in place",
                )
            if change.is_object:
                raise GraphBreakError(
                    f"the forward keeps an object that it makes in {change.path}",
                    why="a captured step makes none, and would leave what was there at first",
                    do="keep numbers, strings, lists or dictionaries of them; or make it elsewhere",
                )
        elif _only_counts(change, heard.codes):
            counters.add(change.path)
            replayed.append(_counting(change))
        elif type(change.before) is not type(change.after) or change.before != change.after:
            if change.was_read and micro_batches > 1:
                raise CaptureError(
                    f"the forward reads {change.path} and changes it, and a step runs it for "
                    f"{micro_batches} micro-batches",
                    why="a program holds what it read as a constant",
                    do="change it outside the forward, or make it a buffer that is written in place",
                )
            replayed.append(_setting(change))
    return PythonValues(heard.reads(counters) if compare else None, tuple(replayed))


def _only_counts(change: Change, codes: Iterable[CodeType]) -> bool:
    """Whether a number is read to be advanced, and for nothing else, by any of the code that ran."""
    if not change.was_read or not all(
        type(x) in (int, float) for x in (change.before, change.after)
    ):
        return False
    return all(_advances(code, change.name) for code in codes)


def _advances(code: CodeType, name: str) -> bool:
    if name in code.co_consts:
        return False  # getattr(self, "calls")
    if name not in code.co_names:
        return True
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        if step.argval != name or step.opname.startswith("STORE"):
            continue
        rest = iter(steps[at + 1 :])
        after = next((s for s in rest if s.opname not in _COUNTING), None)
        stored = step.opname.replace("LOAD", "STORE")  # an attribute's is one, a global's is one
        if after is None or (after.opname, after.argval) != (stored, name):
            return False
    return True


def _counting(change: Change) -> Callable[[], None]:
    by = change.after - change.before

    def count() -> None:
        setattr(change.holder, change.name, getattr(change.holder, change.name) + by)

    return count


def _setting(change: Change) -> Callable[[], None]:
    if change.name and change.holder is not None:
        return lambda: setattr(change.holder, change.name, change.after)
    # By what it is at bottom: a class of its own may do something else.
    kinds = (OrderedDict, dict, list, deque, set)
    kind: Any = next((one for one in kinds if isinstance(change.holder, one)), None)
    if kind is None:
        raise GraphBreakError(
            f"the forward changes {change.path}, which cannot be changed after it",
            why="a captured step would leave what was there at first",
            do="keep a list or a dictionary",
        )
    add = getattr(kind, "update", None) or kind.extend

    def set_again() -> None:
        kind.clear(change.holder)
        add(change.holder, change.after)

    return set_again
