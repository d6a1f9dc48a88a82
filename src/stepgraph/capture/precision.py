"""Mixed precision: the model computes in one type, parameters are stored and updated in another."""

from dataclasses import replace

import torch
from torch import fx

from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, Program

aten = torch.ops.aten


def cast(emit: Builder, node: fx.Node, dtype: torch.dtype | None, tag: str = "") -> fx.Node:
    """The value in another type; ``tag``: marks the cast, if there is one."""
    new = node if dtype is None else emit.cast(node, dtype)
    if tag and new is not node:
        meta(new)[tag] = True
    return new


def replace_gradients(program: Program, cast) -> None:
    """Puts ``cast(emit, name, gradient)`` in the place of each gradient."""
    rows = []
    for role, node, value in program.output_rows:
        if isinstance(role, roles.Grad):
            emit = Builder(program, BACKWARD)
            emit.module = role.name.rpartition(".")[0]
            node = cast(emit, role.name, node)
            value = replace(value, dtype=meta(node)["val"].dtype)
        rows.append((role, node, value))
    program.set_outputs(rows)
