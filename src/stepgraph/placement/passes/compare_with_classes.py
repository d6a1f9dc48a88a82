"""Chooses among classes by comparison."""

from typing import Any

import torch
from torch import fx

from stepgraph.placement.rules.vocabulary import (
    chosen_by_class,
    class_dim,
    one_a_row,
    share_traffic,
)
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass

aten = torch.ops.aten


@program_pass(reads="shapes", writes="``eq`` and ``where`` in place of ``scatter``")
def compare_with_classes(program: Program) -> Program:
    """A number that ``scatter`` puts at one class of each row is chosen by comparing class numbers.

    The gradient of a choice among classes is such a table of zeros and one number a row. A scatter needs
    the zeros in memory and a copy to write into; a comparison is elementwise and merges with its reader.

    Args:
        program: placed; where classes are sharded, placement has spelt them out.
    """
    for node in list(program.operations()):
        if node.target is aten.scatter.value and one_a_row(node):
            node.replace_all_uses_with(_compared(program, node))
    return program.finish()


def _compared(program: Program, node: fx.Node) -> fx.Node:
    """What stands for a scatter of one number a row."""
    builder = Builder(program, meta(node)["phase"], node)
    builder.module = meta(node)["module"]
    made: list[fx.Node] = []

    def emit(*args: Any, **kwargs: Any) -> fx.Node:
        made.append(builder(*args, **kwargs))
        return made[-1]

    value = meta(node)["val"]
    classes = emit(aten.arange.default, value.shape[class_dim(node)], device=value.device)
    new = chosen_by_class(emit, classes, node.args)
    meta(new)["placements"] = meta(node).get("placements", ())
    share_traffic(node, made, node.args[2])  # type: ignore[arg-type]
    return new
