"""What is written to anywhere along a source is seen, and what takes the place of something is followed."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from stepgraph.torch_internals.sources import Sources
from stepgraph.torch_internals.writes import _COUNTS

pytestmark = pytest.mark.skipif(not _COUNTS, reason="this Python does not count writes")

NUMBER = 1.0


@dataclass
class Source:
    """As dynamo's: an expression, and what it begins with."""

    name: str
    base: "Source | None" = None
    member: str = ""


def under(scope, *sources):
    found = Sources()
    for source in sources:
        found.add(source)

    def writes():
        made = found.writes(scope)
        made.remember()
        return made

    return writes


class Holder:
    """Something with attributes."""

    def __init__(self, **values):
        self.__dict__.update(values)


def test_every_step_of_a_source_counts():
    inner = Holder(scale=1.0)
    outer = Holder(table={"inner": inner})
    start = Source("L['it']")
    table = Source("L['it'].table", start)
    item = Source("L['it'].table['inner']", table)
    writes = under({"L": {"it": outer}}, Source("L['it'].table['inner'].scale", item))
    before = writes()
    assert before.none()
    inner.scale = 2.0
    assert not before.none()
    before = writes()
    outer.table = {"inner": inner}
    assert not before.none()
    before = writes()
    outer.table["inner"] = Holder(scale=1.0)
    assert not before.none()
    before = writes()
    inner.scale = 3.0  # nobody reads it any more
    assert before.none()


def test_of_a_function_what_is_read():
    def function(one=1.0, *, other=2.0):
        return one + other

    def plain(one):
        return one

    class Owner:
        method = function

    start, owner = Source("L['f']"), Source("L['it']")
    method = Source("L['it'].method", owner)
    scope = {"L": {"f": function, "it": Owner()}}
    first = Source("L['f'].__defaults__[0]", start)
    other = Source("L['it'].method.__kwdefaults__['other']", method)
    called, read = under(scope, start), under(scope, first)
    of_a_method, flag = under(scope, other), under(scope, Source("L['f'].flag", start))
    function.flag = True
    for write, seen in (
        (lambda: setattr(function, "__name__", "another"), [flag]),
        (lambda: setattr(function, "flag", False), [flag]),
        (lambda: setattr(function, "__defaults__", (3.0,)), [read, flag]),
        (lambda: function.__kwdefaults__.update(other=3.0), [of_a_method, flag]),
        (lambda: setattr(function, "__code__", plain.__code__), [called, read, of_a_method, flag]),
    ):
        before = [(writes, writes()) for writes in (called, read, of_a_method, flag)]
        assert all(made.none() for _, made in before)
        write()
        assert [writes for writes, made in before if not made.none()] == seen


def test_of_a_class_what_it_has_is_no_copy():
    below = type("Below", (Holder,), {"rate": 1.0})
    scope = {"L": {"it": below()}}
    start = Source("L['it']")
    table = Source(
        "dict(type(L['it']).__mro__[0].__dict__)", Source("type(L['it']).__mro__[0]", start)
    )
    writes = under(scope, Source("dict(type(L['it']).__mro__[0].__dict__)['rate']", table))
    before = writes()
    assert before.none()
    below.rate = 2.0
    assert not before.none()


def test_of_a_module_the_names_that_are_read():
    here = sys.modules[__name__]
    module = Source("G['here']")
    writes = under({"G": {"here": here}}, Source("G['here'].NUMBER", module, "NUMBER"))()
    here.OTHER = 1.0
    assert writes.none()
    here.NUMBER = 2.0
    assert not writes.none()


def test_what_is_no_expression_is_never_unwritten():
    scope = {"L": {"it": SimpleNamespace(value=1)}}
    assert not under(scope, Source("what the code has", Source("L['it']")))().none()
