"""Inputs whose shape is not fixed."""

import torch

from stepgraph.lowering.graphs.obstacles import find_obstacles
from tests.graphs.programs import CUDA, shown, traced


def with_unknown_rows(program):
    """Its input has as many rows as a batch happens to have."""
    node = program.placeholders[0]
    mode = node.meta["val"].fake_mode
    rows = mode.shape_env.create_unbacked_symint()
    with mode:
        node.meta["val"] = torch.empty(rows, 4, device="cuda")
    return program


def test_an_input_of_any_number_of_rows():
    program = with_unknown_rows(traced(torch.ops.aten.tanh.default, (4, 4)))
    (found,) = shown(find_obstacles(program, CUDA))
    name = found.split(" ", 1)[0]
    assert found == (
        f"{name} [] its shape is not fixed, and a graph holds one ({name}): bring batches of a few "
        "fixed shapes (stepgraph.pad_batches)"
    )
