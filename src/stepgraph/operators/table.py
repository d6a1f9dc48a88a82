"""Every record, put together from its families; ``of`` is how anybody asks."""

from __future__ import annotations

import functools
from typing import Any

from stepgraph.operators import elements, factories, indexing, rows
from stepgraph.operators.record import Operator, derived


def _gathered() -> dict[Any, dict[str, Any]]:
    known: dict[Any, dict[str, Any]] = {}
    for family in (elements, factories, indexing, rows):
        for targets, facts in family.FACTS:
            for target in targets:
                known.setdefault(target, {}).update(facts)
    return known


KNOWN = _gathered()


@functools.cache
def of(target: Any) -> Operator:
    """The record of an operator: what is declared over what its schema and tags say."""
    return Operator(target, **(derived(target) | KNOWN.get(target, {})))
