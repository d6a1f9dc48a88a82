"""Models that break graphs train sharded, graph by graph, as in plain PyTorch."""

from __future__ import annotations

import pytest

from stepgraph.cli.launcher import launch
from tests.end_to_end.graph_by_graph import (
    PLANS,
    RANKS,
    TOLERANCE,
    Cell,
    all_cells,
    difference,
    plain,
    trained,
)

# Every pair of settings occurs.
EAGER = [
    cell
    for cell in all_cells("eager", ("fp32",))
    if (PLANS.index(cell.plan) + cell.compiled_autograd + cell.checkpointing) % 2 == 0
]
# Every setting occurs, with every other placement.
INDUCTOR = [
    Cell("ddp", "inductor", False, True, "bf16 model"),
    Cell("zero2", "inductor", True, False, "autocast"),
    Cell("zero3", "inductor", True, True, "fp32"),
]
# And every single one, with two placements.
QUICK = [c for c in EAGER if c.compiled_autograd == (c.plan in ("zero1", "zero2"))]
IN_CI = [*EAGER, *INDUCTOR]
OTHERS = [
    cell for lowering in ("eager", "inductor") for cell in all_cells(lowering) if cell not in IN_CI
]


def run_cells(cells):
    """One rank: every cell in turn."""
    return [trained(cell) for cell in cells]


def check_cells(cells):
    for cell, found in zip(cells, launch(run_cells, cells, ranks=RANKS)[0], strict=True):
        assert difference(cell, found, plain(cell)) < TOLERANCE[cell.precision], cell.name
        # Five graphs (the first only enters autocast, the last is the loss), the update, a whole backward.
        assert found["graphs"] == 5 + cell.compiled_autograd, cell.name
        assert found["compiles"] == 6 + cell.compiled_autograd, cell.name
        assert found["after warm-up"] == 0 and not found["recompiles"], cell.name


@pytest.mark.slow
@pytest.mark.parametrize("cells", [QUICK, EAGER], ids=["a quarter", "a half"])
def test_some_of_the_matrix_under_the_eager_lowering(cells):
    check_cells(cells)


@pytest.mark.slow
@pytest.mark.parametrize("cell", INDUCTOR, ids=lambda cell: cell.name)
def test_cells_under_inductor(cell):
    check_cells([cell])


@pytest.mark.slow
@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: cell.name)
def test_all_other_cells(cell):
    check_cells([cell])
