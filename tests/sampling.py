"""Of a matrix's cells, those that ``make test`` runs: the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cells: Iterable[Any], every: int = 2) -> list[Any]:
    """The first cell and each ``every``-th after it; the others run under ``make test-full`` alone.

    A tuple is a cell of as many arguments. Where ``every`` has no
    factor in common with a matrix's sides, each value of each side stays in the sample.
    """
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)),
            marks=[] if number % every == 0 else pytest.mark.slow,
        )
        for number, cell in enumerate(cells)
    ]
