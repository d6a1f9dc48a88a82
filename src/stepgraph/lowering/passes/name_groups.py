"""Names the process groups that collectives run over."""

from collections.abc import Mapping

from stepgraph.program.collectives import is_collective, mesh_dim_of
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass


@program_pass(
    reads="the mesh dimensions of collectives",
    writes="this rank's process groups in their place",
    functional=False,
)
def name_groups(program: Program, groups: Mapping[str, str]) -> Program:
    """Collectives run over process groups, where a mesh dimension stood for each rank's own.

    Args:
        groups: names of mesh dimensions -> names of this rank's process groups.
    """
    for node in program.operations():
        if is_collective(node):
            mesh_dim = mesh_dim_of(node)
            node.args = (*node.args[:-1], groups.get(mesh_dim, mesh_dim))
    return program
