"""Makes symbolic again what was bound to a rank."""

from collections.abc import Mapping

import torch

from stepgraph.program.collectives import is_collective, mesh_dim_of
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass

aten = torch.ops.aten


@program_pass(
    reads="group names in collectives",
    writes="the mesh dimensions they belong to",
)
def name_mesh_dims(program: Program, groups: Mapping[str, str]) -> Program:
    """What was bound to a rank is symbolic again: a backward whose parts were lowered before."""
    mesh_dims = {group: mesh_dim for mesh_dim, group in groups.items()}
    for node in program.operations():
        if is_collective(node):
            node.args = (*node.args[:-1], mesh_dims.get(mesh_dim_of(node), mesh_dim_of(node)))
    return program
