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
