"""Real gloo ranks under inductor: every setting of meshes trains as plain PyTorch does."""

import json
import os
import time
from pathlib import Path

import pytest

from stepgraph.cli.launcher import launch
from tests.end_to_end.mesh_cells import PAIRS, Cell, train

# Every single setting but the plan's name occurs on two ranks: dimensions of one rank stand in where there
# are three. A vocabulary that both ranks have whole gives them one program, which one compiles for both.
WHOLE = {"layers": 1, "vocabulary": 101}
IN_CI = [
    Cell("tp+zero3", "dp=1,tp=2", **WHOLE),
    Cell("tp+sp+zero1", "dp=1,tp=2", "none", "bf16", **WHOLE),
    Cell("hsdp", "replicate=1,shard=2", "full", "fp32", 4, layers=1),
]


def train_one_after_the_other(cells):
    """One rank's (losses, parameters) of each cell."""
    return [train(cell, "inductor") for cell in cells]


def check_cells(cells):
    (ranks,) = {cell.shape.world_size for cell in cells}
    for results in launch(train_one_after_the_other, cells, ranks=ranks):
        for cell, (losses, parameters) in zip(cells, results, strict=True):
            try:
                cell.compare(losses, parameters)
            except AssertionError as error:
                raise AssertionError(f"{cell}: {error}") from error


def test_every_setting_occurs():
    for field in ("memory", "dtype", "micro_batches"):
        assert {getattr(cell, field) for cell in IN_CI} == {getattr(cell, field) for cell in PAIRS}
    assert {"+sp" in cell.plan for cell in IN_CI} == {True, False}


@pytest.mark.slow
def test_two_ranks():
    """In one launch: what takes time is starting ranks and compiling for the first time."""
    check_cells(IN_CI)


@pytest.mark.slow
@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_every_pair_of_settings(cell):
    start = time.perf_counter()
    check_cells([cell])
    if table := os.environ.get("STEPGRAPH_MESH_MATRIX"):
        row = {"plan": cell.plan, "mesh": cell.mesh, "ranks": cell.shape.world_size}
        row |= {"memory": cell.memory, "dtype": cell.dtype, "micro_batches": cell.micro_batches}
        row |= {"equal": True, "seconds": round(time.perf_counter() - start)}
        with Path(table).open("a") as file:
            file.write(json.dumps(row) + "\n")
