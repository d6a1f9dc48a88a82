"""Every kind of write to what was read is seen; a kind that could not be is never said to be none."""

import enum
import functools
import types
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from stepgraph.torch_internals.writes import _COUNTS, Writes

pytestmark = pytest.mark.skipif(not _COUNTS, reason="this Python does not count writes")


class Color(enum.IntEnum):
    RED = 1


class Thing:
    rate = 0.5

    def __init__(self):
        self.value = 1.0


class Named(dict):
    """A dictionary with attributes."""


class Number(float):
    """A number with attributes."""


class Quiet(list):
    """Elements that are not told."""

    def __iter__(self):
        return iter(())


class Pair(NamedTuple):
    one: int = 1


class Attributed(Pair):
    """A tuple with attributes."""


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0


def watched(*values):
    writes = Writes()
    for value in values:
        writes.watch(value)
    writes.remember()
    return writes


def closed_over(value):
    def change(new):
        nonlocal value
        value = new

    return change, change.__closure__[0]


def function_of(default=1.0, *, other=2.0):
    return default + other


def test_nothing_written():
    change, cell = closed_over(1.0)
    values = [Thing(), {"a": 1}, [1.0], nn.Linear(2, 2), OrderedDict(a=1), function_of, cell, Thing]
    writes = watched(*values)
    assert writes.none() and writes.none()
    values[0].value = values[0].value  # the same object
    values[3].weight.data.fill_(1)  # a tensor is no value of Python's
    assert writes.none()


WRITES = {
    "attribute": (Thing, lambda it: setattr(it, "value", 2.0)),
    "another type, equal": (Thing, lambda it: setattr(it, "value", 1)),
    "new attribute": (Thing, lambda it: setattr(it, "rate", 0.1)),
    "no attribute": (Thing, lambda it: delattr(it, "value")),
    "vars": (Thing, lambda it: vars(it).update(value=3.0)),
    "its dictionary": (Thing, lambda it: setattr(it, "__dict__", {"value": 2.0})),
    "its class": (Thing, lambda it: setattr(it, "__class__", type("Other", (Thing,), {}))),
    "mode": (lambda: nn.Dropout(0.1), lambda it: it.eval()),
    "number of a module": (lambda: nn.Dropout(0.1), lambda it: setattr(it, "p", 0.2)),
    "item": (lambda: {"a": 1.0}, lambda it: it.update(a=2.0)),
    "new item": (lambda: {"a": 1.0}, lambda it: it.update(b=2.0)),
    "no item": (lambda: {"a": 1.0}, lambda it: it.clear()),
    "default item": (lambda: defaultdict(int), lambda it: it["a"]),
    "what makes items": (
        lambda: defaultdict(int),
        lambda it: setattr(it, "default_factory", float),
    ),
    "order": (lambda: OrderedDict(a=1, b=2), lambda it: it.move_to_end("a")),
    "attribute of a dictionary": (Named, lambda it: setattr(it, "value", 1.0)),
    "attribute of a tensor": (lambda: torch.ones(2), lambda it: setattr(it, "value", 1.0)),
    "attribute of a number": (lambda: Number(1.0), lambda it: setattr(it, "value", 1.0)),
    "attribute of a tuple": (Attributed, lambda it: setattr(it, "value", 1.0)),
    "attribute of a member": (lambda: Color.RED, lambda it: setattr(it, "value_of_it", object())),
    "what is called": (
        lambda: functools.partial(max, 1),
        lambda it: it.__setstate__((min, (), {}, {})),
    ),
    "what it is called with": (
        lambda: functools.partial(max, key=id),
        lambda it: it.keywords.clear(),
    ),
    "element that is not told": (lambda: Quiet([1.0]), lambda it: it.append(3.0)),
    "element": (lambda: [1.0, 2.0], lambda it: it.__setitem__(0, 3.0)),
    "length": (lambda: [1.0, 2.0], lambda it: it.append(3.0)),
}


@pytest.mark.parametrize("what", WRITES)
def test_write_is_seen(what):
    make, write = WRITES[what]
    it = make()
    writes = watched(it)
    assert writes.none()
    write(it)
    assert not writes.none()
    writes.remember()
    assert writes.none()


def test_write_by_code_that_has_run_often():
    """Python writes attributes in another way where a line has written them before."""
    it = Thing()
    writes = watched(it)
    for number in range(100):
        it.value = float(number)
        assert not writes.none()
        writes.remember()
        assert writes.none()


def test_write_to_a_class_and_to_its_base():
    below = type("Below", (Thing,), {})
    own = types.new_class("Own", (below,))
    writes = watched(own())
    below.rate = 0.25
    assert not writes.none()
    writes.remember()
    own.rate = 0.1
    assert not writes.none()


def test_write_to_a_class_that_has_been_looked_at_since():
    """Python numbers a class anew when something is looked up: never as it was."""
    below = type("Below", (Thing,), {})
    writes = watched(below())
    for number in range(3):
        below.rate = number
        assert below.rate == number
        assert not writes.none()
        writes.remember()
        assert writes.none() and below.rate == number and writes.none()
    below.rate = 3  # and nothing looked up: it has no number
    writes.remember()
    assert writes.none()
    below.rate = 4
    assert not writes.none()


def test_write_to_classes_whose_class_has_its_own_ways():
    class Meta(type):
        def __getattribute__(cls, name):
            return type.__getattribute__(cls, name)

        def __eq__(cls, other):
            raise RuntimeError

        def mro(cls):
            return type.mro(cls)

        __hash__ = type.__hash__

    own = Meta("Own", (Thing,), {})
    writes = watched(own, Thing)
    first = writes.none()  # as far as can be known
    type.__setattr__(own, "rate", 2.0)
    assert not writes.none() and first


def test_write_to_the_bases_of_a_class_and_to_the_class_of_a_class():
    meta = type("Meta", (type,), {"rate": 1.0})
    other = type("Other", (Thing,), {})
    own = meta("Own", (Thing,), {})
    writes = watched(own)
    own.__bases__ = (other,)
    assert not writes.none()
    writes.remember()
    meta.rate = 2.0
    assert not writes.none()


def test_write_to_a_cell_and_to_a_function():
    def function(default=1.0):
        return default

    change, cell = closed_over(1.0)
    writes = watched(cell, function)
    change(2.0)
    assert not writes.none()
    writes.remember()
    function.__defaults__ = (2.0,)
    assert not writes.none()
    writes.remember()
    function.__code__ = (lambda default: default + 1).__code__
    assert not writes.none()


def test_only_the_names_that_were_read_of_a_module():
    module = types.ModuleType("module")
    module.read, module.other = 1.0, 1.0
    writes = Writes()
    writes.watch_name(module, "read")
    writes.remember()
    module.other = 2.0
    assert writes.none()
    module.read = 2.0
    assert not writes.none()
    writes.remember()
    del module.read
    assert not writes.none()


def test_a_tuple_with_names_is_fixed():
    assert watched(Pair(), torch.Size([1])).none()


@pytest.mark.parametrize("change", [
    lambda f: f.__kwdefaults__.update(other=3.0),
    lambda f: setattr(f, "__kwdefaults__", {"other": 3.0}),
    lambda f: setattr(f, "__dict__", {"flag": True}),
    lambda f: setattr(f, "flag", True),
    lambda f: setattr(f, "__name__", "another"),
])  # fmt: skip
def test_write_to_a_function(change):
    function = types.FunctionType(function_of.__code__, {})
    function.__kwdefaults__ = {"other": 2.0}
    writes = watched(function)
    assert writes.none()
    change(function)
    assert not writes.none()


def test_slots_whose_names_are_gone_are_slots():
    slotted = type("Own", (), {"__slots__": ("value",)})
    del slotted.__slots__
    assert not watched(slotted()).none()


@pytest.mark.parametrize("make", [Slotted, lambda: np.zeros(2), set, bytearray])
def test_never_none_where_writes_are_not_seen(make):
    writes = watched({"a": 1}, make())
    assert not writes.none()
    writes.remember()
    assert not writes.none()


def test_nothing_is_known_before_it_is_remembered():
    writes = Writes()
    writes.watch({"a": torch.ones(2)})
    assert not writes.none()
