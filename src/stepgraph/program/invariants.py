"""What must hold of every Program, as a table of named checks; run after every pass in tests.

A violated invariant is a bug in the pass that ran last; the error shows the operations around it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.errors import InvariantError
from stepgraph.program import roles
from stepgraph.program.build import ShapeRunner
from stepgraph.program.collectives import ON_FIRST, SHARD_OF, is_collective, mesh_dim_of
from stepgraph.program.copies import WAIT_COPY, is_copy
from stepgraph.program.layout import local_shape
from stepgraph.program.metadata import meta
from stepgraph.program.program import PHASES, Program, is_write, tensors_of

Check = Callable[[Program], Iterator[tuple[fx.Node | None, str]]]


def _inputs_and_outputs_are_typed(program: Program):
    """Every placeholder and result has a role and a value description."""
    if not len(program.placeholders) == len(program.inputs) == len(program.input_values):
        yield None, "inputs and placeholders differ in number"
    if not len(program.results) == len(program.outputs) == len(program.output_values):
        yield None, "outputs and results differ in number"
    for kind, found in (("input", program.inputs), ("output", program.outputs)):
        if len(set(found)) != len(found):
            yield None, f"two {kind}s have the same role"


def _metadata_is_complete(program: Program):
    """Every operation has a value, a phase, a module and a unique stable name."""
    names: set[str] = set()
    for node in program.operations():
        for key in ("val", "phase", "module", "name"):
            if key not in meta(node):
                yield node, f"meta[{key!r}] is missing"
        if meta(node).get("phase") not in PHASES:
            yield node, f"unknown phase {meta(node).get('phase')!r}"
        if meta(node).get("name") in names:
            yield node, "its stable name is taken"
        names.add(meta(node).get("name", ""))


def _uses_follow_definitions(program: Program):
    """No value is read before it is made."""
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield node, f"reads {source} before it is made"
        seen.add(node)


def _phases_are_in_order(program: Program):
    """No forward operation reads a backward value; only the update reads the update's values."""
    order = {phase: i for i, phase in enumerate(PHASES)}
    for node in program.operations():
        for source in node.all_input_nodes:
            if source.op == "call_function" and (
                order[meta(source)["phase"]] > order[meta(node)["phase"]]
            ):
                yield node, f"{meta(node)['phase']} reads {meta(source)['phase']} ({source})"


def _shapes_agree(program: Program):
    """Shapes and dtypes in the metadata are what the operations compute."""
    shapes = ShapeRunner(program.graph)
    for node in program.operations():
        if is_write(node):
            continue
        try:
            value = shapes.run(node.target, node.args, node.kwargs)
        except Exception as error:
            yield node, f"does not run on its arguments' shapes: {str(error)[:200]}"
            continue
        for have, want in zip(tensors_of(meta(node)["val"]), tensors_of(value), strict=True):
            if have.shape != want.shape or have.dtype != want.dtype:
                yield node, f"is {_show(want)}, its metadata says {_show(have)}"


def _interface_matches(program: Program):
    """Inputs and results have the shapes and dtypes that their descriptions and placements say."""
    rows = [
        *zip(program.placeholders, program.inputs, program.input_values, strict=True),
        *zip(program.results, program.outputs, program.output_values, strict=True),
    ]
    for node, role, value in rows:
        shape = value.shape
        if program.mesh is not None and value.placements is not None:
            shape = local_shape(shape, value.placements, program.mesh)
        have = meta(node).get("val")
        if isinstance(have, torch.Tensor) and (
            tuple(have.shape) != tuple(shape) or have.dtype != value.dtype
        ):
            yield node, f"{roles.label(role)} is {_show(have)}, described as {list(shape)}"


def _state_is_replaced_in_kind(program: Program):
    """A New* output has the description of the input whose storage it replaces."""
    inputs = dict(zip(program.inputs, program.input_values, strict=True))
    rows = zip(program.outputs, program.output_values, program.results, strict=True)
    for role, value, node in rows:
        written = roles.written_input(role)
        if written is not None and written in inputs and inputs[written] != value:
            yield node, f"{roles.label(role)} is {value}, the input is {inputs[written]}"


def _collectives_are_awaited_once(program: Program):
    """Every collective has exactly one reader, the ``wait_tensor`` that completes it."""
    for node in program.operations():
        if not is_collective(node):
            continue
        readers = list(node.users)
        if len(readers) != 1:
            yield node, f"is read {len(readers)} times; exactly one wait_tensor must read it"
        if any(reader.target is not torch_internals.WAIT for reader in readers):
            yield node, "is read without waiting for it"


def _waits_complete_collectives(program: Program):
    """``wait_tensor`` is applied to collectives only."""
    for node in program.operations():
        if node.target is torch_internals.WAIT:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not is_collective(source):
                yield node, "waits for something that is not a collective"


def _copies_are_awaited_once(program: Program):
    """Every copy to the host or back has one reader, the ``wait_copy`` that completes it."""
    for node in program.operations():
        if is_copy(node):
            waits = [(u.target, u.args[:2]) for u in node.users]
            if waits != [(WAIT_COPY, (node, node.args[0]))]:
                yield node, f"is read {len(waits)} times; exactly one wait_copy of it must read it"
        elif node.target is WAIT_COPY:
            started = node.args[0]
            if not isinstance(started, fx.Node) or not is_copy(started):
                yield node, "waits for something that is not a copy"


def _groups_exist(program: Program):
    """Collectives and slices run over dimensions of the Program's mesh."""
    for node in program.operations():
        if not is_collective(node) and node.target not in (SHARD_OF, ON_FIRST):
            continue
        if program.mesh is None or mesh_dim_of(node) not in program.mesh.names:
            yield node, f"runs over {mesh_dim_of(node)!r}, which is no dimension of the mesh"


def _nothing_is_mutated(program: Program):
    """Programs are functional: only lowering writes into inputs."""
    for node in program.operations():
        if is_write(node):
            yield node, "writes into an argument"


INVARIANTS: dict[str, Check] = {
    "inputs and outputs are typed": _inputs_and_outputs_are_typed,
    "uses follow definitions": _uses_follow_definitions,
    "metadata is complete": _metadata_is_complete,
    "phases are in order": _phases_are_in_order,
    "nothing is mutated": _nothing_is_mutated,
    "shapes agree": _shapes_agree,
    "interface matches": _interface_matches,
    "state is replaced in kind": _state_is_replaced_in_kind,
    "collectives are awaited once": _collectives_are_awaited_once,
    "waits complete collectives": _waits_complete_collectives,
    "copies are awaited once": _copies_are_awaited_once,
    "groups exist": _groups_exist,
}


def check_invariants(program: Program, after: str = "capture") -> None:
    """Runs every check of :data:`INVARIANTS`.

    Raises:
        InvariantError: names the invariant, the operation and the pass, with ten operations around.
    """
    for name, check in INVARIANTS.items():
        for node, problem in check(program):
            place = "" if node is None else str(meta(node).get("name", node))
            raise InvariantError(
                f"after {after}: invariant '{name}' is violated: {problem}",
                where=f"{place}\n{_around(program, node)}" if node is not None else None,
                why="a bug in that pass",
            )


def _around(program: Program, node: fx.Node) -> str:
    nodes = list(program.graph.nodes)
    if node not in nodes:
        return ""
    at = nodes.index(node)
    near = nodes[max(0, at - 5) : at + 5]
    return "\n".join(
        f"    {'->' if n is node else '  '} {meta(n).get('name', n)} = {n.target}{n.args}"[:160]
        for n in near
    )


def _show(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
