"""What stands in a plan file, version 4, as types: msgspec checks a file against them.

An object of a file is a dataclass's own, field by field: :func:`form` makes its type. What is written in
another way (names folded over layers, placements as texts) is said here, and read by
:mod:`stepgraph.planning.file`.
"""

import functools
import operator
from dataclasses import is_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from stepgraph.cost.predict import Prediction
from stepgraph.planning.decisions import (
    FrontierPoint,
    MemoryDecision,
    PlacementDecision,
    ScheduleDecision,
)
from stepgraph.planning.placements import MOST_DIMS
from stepgraph.planning.plan import Plan
from stepgraph.planning.reading import AnyNumber, Count, Number, Positive, Strict, Text, TypeText
from stepgraph.planning.request import Request

VERSION = 4
MOST_RANKS = 2**20

Folded = dict[Text, list[Text]]
"""Layers -> patterns of names; see :mod:`stepgraph.planning.folding`."""
Groups = dict[Text, Folded]
"""What is said -> the names of which it is said."""


class Volume(Strict, frozen=True):
    """How much is moved."""

    count: Count
    bytes: Count


MeshRows = Annotated[
    list[tuple[Text, Annotated[int, Meta(ge=1, le=MOST_RANKS)]]], Meta(min_length=1, max_length=8)
]
Pieces = Annotated[int, Meta(ge=1, le=2**20)]
BatchDims = dict[Text, tuple[Annotated[int, Meta(ge=0, le=MOST_DIMS)], Positive]]
ReasonRow = tuple[Text, AnyNumber | None, Text | None, AnyNumber | None, Folded]
MovesRow = tuple[Text, Text, Text, Count, Count]
ReadsRow = Annotated[list[Text | Count], Meta(min_length=2)]  # placement, count, first readers
FactsRow = tuple[TypeText, list[ReadsRow], list[MovesRow], Folded]

_LIMITED: dict[Any, Any] = {str: Text, int: Count, float: Number}
_FORMS: dict[type, type] = {}
_KINDS: dict[type, type] = {}


def form(kind: type, **otherwise: Any) -> Any:
    """The strict type of what a file has of a dataclass; what may be None may be left out.

    Texts and numbers are limited, where the field's own type does not limit them.

    Args:
        otherwise: fields that are of another type in the file; None: that are not in it.
    """
    hints = get_type_hints(kind, include_extras=True)
    hints = {name: _limited(hint) for name, hint in (hints | otherwise).items() if hint is not None}
    fields = [
        (name, hint, None) if NoneType in get_args(hint) else (name, hint)
        for name, hint in hints.items()
    ]
    made = msgspec.defstruct(kind.__name__, fields, bases=(Strict,), frozen=True, kw_only=True)
    _FORMS[kind], _KINDS[made] = made, kind
    return made


def _limited(hint: Any) -> Any:
    if is_dataclass(hint):
        return _FORMS.get(hint) or form(hint)  # type: ignore[arg-type]
    arguments, origin = get_args(hint), get_origin(hint)
    if not arguments or origin is Annotated:
        return _LIMITED.get(hint, hint)
    limited = tuple(map(_limited, arguments))
    return functools.reduce(operator.or_, limited) if NoneType in limited else origin[limited]


def made_of(found: Any, **otherwise: Any) -> Any:
    """The dataclass whose form was read; other fields of it, where they are given."""
    if type(found) not in _KINDS:
        return found
    given = {name: made_of(value) for name, value in msgspec.structs.asdict(found).items()}
    return _KINDS[type(found)](**(given | otherwise))


form(Request, mesh=MeshRows)
form(
    PlacementDecision,
    inputs=Groups,
    outputs=Groups,
    operations=Groups,
    reasons=list[ReasonRow],
    batch_dims=BatchDims,
)
form(
    MemoryDecision,
    recompute=dict[Text, list[Text]],  # {"0:2 1:3": [patterns]}
    pieces=dict[Text, Pieces] | None,
    offload=Folded | None,
)
form(ScheduleDecision, updates=Groups | None, waits=Groups)
form(Prediction, collectives=dict[Text, Volume], collectives_by_dim=dict[Text, Volume])
form(FrontierPoint)
PlanFile = form(Plan, version=int, values=dict[Text, list[FactsRow]], final=None)
