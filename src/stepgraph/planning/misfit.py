"""Whether placements that come from elsewhere can be those of a Program."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import InnerShard, MeshShape, Placements, show
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments, tensors_of


def misfit(decision: PlacementDecision, program: Program, mesh: MeshShape) -> str:
    """What is wrong with a decision that names all that a global Program has; empty: nothing.

    Checks counts and dimensions. That the placements are right together is for ``stepgraph.check``.
    """
    for roles_of, values, placed in (
        (program.inputs, program.input_values, decision.inputs),
        (program.outputs, program.output_values, decision.outputs),
    ):
        for role, value in zip(roles_of, values, strict=True):
            label = roles.label(role)
            if problem := _wrong(placed[label], value.shape, mesh):
                return f"{label} of shape {list(value.shape)} cannot be {problem}"
    for node in program.operations():
        name = meta(node)["name"]
        choice = decision.operations[name]
        arguments = tensor_arguments(node)
        value = meta(node)["val"]
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        if len(choice.inputs) != len(arguments) or len(choice.outputs) != len(results):
            return (
                f"{name} has {len(arguments)} tensor arguments and {len(results)} results, "
                f"the plan places {len(choice.inputs)} and {len(choice.outputs)}"
            )
        pairs = [*zip(choice.inputs, (meta(a)["val"] for a in arguments), strict=True)]
        pairs += [
            (placements, result)
            for placements, result in zip(choice.outputs, results, strict=True)
            if placements is not None
        ]
        for placements, value in pairs:
            tensors = tensors_of(value)
            if len(tensors) == 1 and (problem := _wrong(placements, tensors[0].shape, mesh)):
                return f"{name}: a tensor of shape {list(tensors[0].shape)} cannot be {problem}"
    return ""


def _wrong(placements: Placements, shape: tuple[int, ...], mesh: MeshShape) -> str:
    if len(placements) != len(mesh.dims):
        return f"{show(placements)} on the mesh {mesh}"
    for placement in placements:
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            return f"{show(placements)}: there is no dimension {placement.dim}"
        if isinstance(placement, InnerShard) and shape[placement.dim] % placement.outer:
            return f"{show(placements)}: {placement.outer} blocks do not divide it"
    return ""
