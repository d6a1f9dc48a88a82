"""What a model looks like now: this is looked at before every call."""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from stepgraph.torch_internals import watchers
from stepgraph.torch_internals.words import Snapshot
from stepgraph.torch_internals.writes import Writes

_LOOKED_AT = operator.attrgetter("_modules", "_parameters", "training")
_HOOKS = operator.attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_TABLES = operator.attrgetter(
    "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
_VALUES = operator.methodcaller("values")


@dataclass(frozen=True)
class Look:
    """Of every module once, in the order of ``model.modules()``.

    Attributes:
        parts: as they are listed; another list where one of them is another.
        parameters: in the order of ``model.parameters()``.
        training: each module's flag.
        forward_hooks: the numbers of each module's hooks around its forward, and of those of all modules.
        backward_hooks: some module has hooks on its backward, or all have.
        structure: which module holds which, under which names: a number, another one for another structure;
            two of one :class:`Watched` can be compared.
    """

    parts: list[nn.Module] = field(compare=False)
    parameters: list[nn.Parameter]
    training: tuple[bool, ...]
    forward_hooks: tuple[tuple[int, ...], ...]
    backward_hooks: bool
    structure: int = field(compare=False)


def look_at(model: nn.Module) -> Look:
    """Looks at every module of a model."""
    return Watched(model)._look()


class Watched:
    """A model that is looked at again and again: its parts are looked for when they are others."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[nn.Module] = [model]
        self._below: list[int] = []  # what parts hold
        self._held: list[int] = []
        self._parameters: list[nn.Parameter] = []
        self._structures: dict[tuple, int] = {}
        self._last: Look | None = None
        self._tables: list[int] = []  # where what is looked at is written to
        self._writes, self._is_known = Writes(), False
        self._find_parts()

    def look(self) -> Look:
        """How it looks now; takes microseconds where nothing was written to since before the last look."""
        if self._last is None or not (self._is_known and self._writes.none()):
            self._last = self._look()
            self._watch_tables()
            self._is_known = self._writes.none()  # since before that look
            if not self._is_known:
                self._writes.remember()
        return self._last

    @property
    def last(self) -> Look:
        """How it looked."""
        return self._last if self._last is not None else self.look()

    def snapshot(self) -> Snapshot | None:
        """What would have to be written to for it to look otherwise; None: that is not known."""
        return self._writes.snapshot() if self._is_known else None

    def _watch_tables(self) -> None:
        tables = [
            *map(vars, self._parts),
            *itertools.chain.from_iterable(map(_TABLES, self._parts)),
            *watchers.hooks_on_all_modules(),
        ]
        if self._tables == (now := [*map(id, tables), *map(len, tables)]):
            return
        self._tables, self._writes = now, Writes()
        for part in self._parts:
            self._writes.watch(part)
            if "training" not in vars(part):  # a class of its own has it elsewhere
                self._writes.unknown()
        for table in tables:
            self._writes.watch_table(table)
            if table:  # an empty one has no order
                self._writes.watch(table)

    def _look(self) -> Look:
        modules, parameters, training = zip(*map(_LOOKED_AT, self._parts), strict=True)
        if self._below != _held_by(modules):
            self._find_parts()
            modules, parameters, training = zip(*map(_LOOKED_AT, self._parts), strict=True)
        held = [*itertools.chain.from_iterable(map(_VALUES, parameters))]
        if self._held != (ids := [*map(id, held)]):
            self._held = ids
            self._parameters = [*{id(one): one for one in held if one is not None}.values()]
        return Look(self._parts, self._parameters, training, *self._hooks(), self._structure)

    def _hooks(self) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """Those around forwards, and whether there are any on backwards."""
        tables, (forward_of_all, backward_of_all) = (
            [*map(_HOOKS, self._parts)],
            watchers.of_users(),
        )
        if not (forward_of_all or backward_of_all or any(itertools.chain.from_iterable(tables))):
            return self._no_hooks, False
        forward = tuple((*after, *before) for after, before, *_ in tables)
        backward = any(after or before for *_, after, before in tables)
        return (*forward, forward_of_all), backward or backward_of_all

    def _find_parts(self) -> None:
        self._parts = [*self._parts[0].modules()]
        self._below = _held_by(part._modules for part in self._parts)
        self._no_hooks = ((),) * len(self._parts)
        number = {id(part): i for i, part in enumerate(self._parts)}
        structure = tuple(
            tuple((name, number.get(id(below))) for name, below in part._modules.items())
            for part in self._parts
        )
        self._structure = self._structures.setdefault(structure, len(self._structures))


def _held_by(tables: Iterable[dict[str, nn.Module | None]]) -> list[int]:
    """Of each table of modules how many it holds, and which."""
    tables = [*tables]
    return [*map(len, tables), *map(id, itertools.chain.from_iterable(map(_VALUES, tables)))]
