"""What is looked at before every call: a model's modules, its data, and what code reads from Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import nn

from stepgraph.runtime.assigned_data import AssignedData
from stepgraph.runtime.compiled import Compiled, that_holds
from stepgraph.torch_internals.modules import Look, Watched
from stepgraph.torch_internals.words import Together

_LONGEST = 64  # calls


class Checks:
    """Looks at all of it, in the order of its methods.

    Where the same programs run call after call, all that must not have been written to since is compared in
    one gather of words; each by itself only where something was. A gather is made after some calls of the
    same programs, the more of them the more often it had to be.
    """

    def __init__(self, model: nn.Module) -> None:
        self.watched, self.data = Watched(model), AssignedData(model)
        self._together: Together | None = None
        # The programs of that, and of the last calls.
        self._last: Callable[[], Compiled | None] = lambda: None
        self._before = self._last
        self._calls, self._wait = 0, 1
        self._same = False

    def look(self) -> Look:
        """What the model looks like."""
        self._same = self._together is not None and self._together.same()
        if not self._same:
            self._together = None  # it keeps alive what there was
        return self.watched.last if self._same else self.watched.look()

    def check_data(self) -> None:
        """Raises :class:`~stepgraph.errors.UsageError`: other data was assigned to parameters."""
        if not self._same:
            self.data.check()

    def that_holds(
        self, compiled: Sequence[Compiled], as_captured: Callable[[], AbstractContextManager]
    ) -> Compiled | None:
        """:func:`stepgraph.runtime.compiled.that_holds`."""
        if self._same and compiled and compiled[0] is self._last():
            return compiled[0]
        found = that_holds(compiled, as_captured)
        if found is not None:
            self._count(found)
        return found

    def _count(self, found: Compiled) -> None:
        if found is not self._before():
            self._before, self._calls = weakref.ref(found), 0
        self._calls += 1
        if self._calls > self._wait:
            self._calls, self._wait = 0, min(_LONGEST, 2 * self._wait)
            parts = self.watched.snapshot(), self.data.snapshot(), found.values.snapshot()
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self._together, self._last = Together(known), self._before
