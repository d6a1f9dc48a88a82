"""Applies a placement decision: the global Program becomes one rank's own.

Reductions stand right behind the value they reduce, so that the unreduced value dies at once; gathers
and slices stand right before their first reader, so that the whole value is born late.
"""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.fx.node import map_arg

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.operators.own import replicated_note
from stepgraph.operators.views import NAMES_A_SHAPE
from stepgraph.placement.passes.draw_by_global_row import local_part_of
from stepgraph.placement.rules.blocks import is_split, local_sizes
from stepgraph.placement.rules.redistribution import redistribute_over
from stepgraph.placement.rules.vocabulary import LOCAL_FORMS, Rows, rows_sharded, share_traffic
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program import roles
from stepgraph.program.build import ShapeRunner
from stepgraph.program.layout import MeshShape, Placements, local_shape, replicated, to_torch
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, Program, Value, tensor_arguments, tensors_of
from stepgraph.program.randomness import RANDOM
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals.code import call_node, graph_module

aten = torch.ops.aten

_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}


@program_pass(
    reads="placements of every input, operation and output (a :class:`PlacementDecision`)",
    writes=(
        "``shard_of``, collectives and waits where a value is read otherwise than it was "
        "made; local sizes in view-like arguments; placements and local shapes in "
        "the metadata"
    ),
    preserves=SUMMATION,
)
def place_values(program: Program, decision: PlacementDecision, mesh: MeshShape) -> Program:
    """Rewrites a global Program into the SPMD Program of a mesh; see the module docstring."""
    return _Placer(program, decision, mesh).run()


class _Placer:
    def __init__(self, program: Program, decision: PlacementDecision, mesh: MeshShape) -> None:
        self.program, self.decision, self.mesh = program, decision, mesh
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.placed: dict[tuple[fx.Node, Placements], fx.Node] = {}
        self.shapes = ShapeRunner(program.graph)
        self.role_of = {node: role for role, node, _ in program.input_rows}
        self.wanted = self._wanted_placements()

    def run(self) -> Program:
        program = self.program
        input_values = [self._input(*row) for row in program.input_rows]
        for node in program.graph.nodes:
            if node.op == "get_attr":
                self._set(node, self.graph.node_copy(node), (replicated(self.mesh),))
            elif node.op == "call_function":
                self._operation(node)
        results, output_values = [], []
        for role, node, value in program.output_rows:
            wanted = self.decision.outputs[roles.label(role)]
            results.append(self._as(node, wanted, None))
            output_values.append(replace(value, placements=wanted))
        self.graph.output(tuple(results))
        name_operations(self.graph)
        module, notes = graph_module(program.module, self.graph), list(program.notes)
        inputs, outputs = list(program.inputs), list(program.outputs)
        placed = Program(
            program.name, module, inputs, outputs, input_values, output_values, self.mesh, notes
        )
        for text in self.decision.notes:
            placed.note(text)
        for name, operator_name in self.decision.unruled.items():
            placed.note(replicated_note(operator_name, name))
        return placed.finish()

    def _wanted_placements(self) -> dict[fx.Node, dict[Placements, None]]:
        """Every placement in which each value is read, in order of reading."""
        wanted: dict[fx.Node, dict[Placements, None]] = {}
        for node in self.program.operations():
            if node.target is operator.getitem:
                continue
            choice = self.decision.operations[meta(node)["name"]]
            for argument, placements in zip(tensor_arguments(node), choice.inputs, strict=True):
                wanted.setdefault(argument, {})[placements] = None
        for role, node, _ in self.program.output_rows:
            wanted.setdefault(node, {})[self.decision.outputs[roles.label(role)]] = None
        return wanted

    def _input(self, role: roles.Input, node: fx.Node, value: Value) -> Value:
        stored = self.decision.inputs[roles.label(role)]
        new = self.graph.node_copy(node)
        if any(isinstance(placement, Shard) for placement in stored):
            shape, device = local_shape(value.shape, stored, self.mesh), meta(node)["val"].device
            with self.shapes.mode:
                meta(new)["val"] = torch.empty(shape, dtype=value.dtype, device=device)
        self._set(node, new, (stored,))
        return replace(value, placements=stored)

    def _set(self, old: fx.Node, new: fx.Node, placements: tuple) -> None:
        self.new[old] = new
        meta(new)["placements"] = placements
        if len(placements) != 1 or placements[0] is None:
            return
        self.placed[old, placements[0]] = new
        if any(isinstance(placement, Partial) for placement in placements[0]):
            for wanted in self.wanted.get(old, ()):
                self._as(old, wanted, None)

    def _operation(self, node: fx.Node) -> None:
        choice = self.decision.operations[meta(node)["name"]]
        if node.target is operator.getitem:
            args: tuple = (self.new[node.args[0]], node.args[1])  # type: ignore[index]
            kwargs: dict = {}
        else:
            wanted = iter(choice.inputs)
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda a: self._as(a, next(wanted), node)
            )
        if table := rows_sharded(node, choice.inputs, choice.outputs):
            self._set(node, self._on_own_rows(node, tuple(args), *table), choice.outputs)
            return
        target, args = self._localise(node, tuple(args), dict(kwargs), choice)
        self._set(node, self._emit(target, args, dict(kwargs), meta(node)), choice.outputs)

    def _on_own_rows(self, node: fx.Node, args: tuple, axis: int, size: int) -> fx.Node:
        """What a rank does alone where the rows of a table are sharded."""
        made: list[fx.Node] = []
        unnamed = {"placements": (), **{k: v for k, v in meta(node).items() if k != "name"}}

        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made.append(self._emit(target, args, kwargs, unnamed))
            return made[-1]

        name, ranks = self.mesh.dims[axis]
        rows = Rows(emit, size, name, ranks, tensors_of(meta(node)["val"])[0].device)
        new = LOCAL_FORMS[node.target](rows, node, args)
        share_traffic(node, made, args[2] if node.target is aten.scatter.value else args[1])
        meta(new)["name"] = meta(node)["name"]
        return new

    def _localise(self, node: fx.Node, args: tuple, kwargs: dict, choice) -> tuple[Any, tuple]:
        """Global sizes among the arguments become this rank's."""
        target = node.target
        if target in _SQUEEZES:
            return aten.squeeze.dims, (args[0], _squeezed_dims(node))
        placed = (*choice.inputs, *choice.outputs)
        if not any(isinstance(p, Shard) for placements in placed for p in placements or ()):
            return target, args
        if is_split(node):
            return target, local_sizes(node, args, choice.outputs, self.mesh)
        if target is RANDOM:
            return target, local_part_of(node, args, choice.outputs[0], self.mesh)
        if adjuster := torch_internals.scalar_shape_adjuster(target):
            return target, self._adjust(adjuster, node, args, kwargs, choice)
        position = operators.of(target).shape_argument
        if position is None:
            position = torch_internals.shape_argument(target)
        if position is not None:
            shape = local_shape(meta(node)["val"].shape, choice.outputs[0], self.mesh)
            args = (*args[:position], list(shape), *args[position + 1 :])
        return target, args

    def _adjust(self, adjuster, node: fx.Node, args: tuple, kwargs: dict, choice) -> tuple:
        mesh = torch_internals.planning_mesh(self.mesh.sizes)
        pairs = zip(tensor_arguments(node), choice.inputs, strict=True)
        specs = [
            torch_internals.tensor_spec(mesh, tuple(map(to_torch, placed)), meta(argument)["val"])
            for argument, placed in pairs
        ]
        remaining = iter(specs)
        spec_args = map_arg(node.args, lambda a: next(remaining))  # type: ignore[arg-type]
        sizes = torch_internals.adjust_scalar_shapes(
            node.target, adjuster, tuple(spec_args), kwargs, specs
        )
        return tuple(
            size if isinstance(size, int) and isinstance(arg, int) else arg
            for size, arg in zip(sizes, args, strict=True)
        )

    def _emit(self, target: Any, args: tuple, kwargs: dict, about: Mapping) -> fx.Node:
        value = self._value(target, args, kwargs)
        if value is None:  # a view that the local strides do not allow
            extra = {key: about[key] for key in ("phase", "module") if key in about}
            contiguous = {"memory_format": torch.contiguous_format}
            whole = self._emit(aten.clone.default, args[:1], contiguous, extra)
            args = (whole, *args[1:])
            value = self._value(target, args, kwargs)
        new = call_node(self.graph, target, args, kwargs)
        set_meta(new, {**about, "val": value})
        return new

    def _value(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """The local result, or None for a view that the local strides do not allow."""
        try:
            return self.shapes.run(target, args, kwargs)
        except (RuntimeError, ValueError):
            if target not in NAMES_A_SHAPE:
                raise
            return None

    def _as(self, node: fx.Node, wanted: Placements, reader: fx.Node | None) -> fx.Node:
        """The value of ``node`` placed as ``wanted``, redistributing it at most once."""
        key = node, wanted
        if (found := self.placed.get(key)) is not None:
            return found
        new = self.new[node]
        (current,) = meta(new)["placements"]
        assert current is not None
        shape = tuple(meta(node)["val"].shape)
        name = meta(new)["name"]
        about = {
            "phase": meta(new if reader is None else reader).get("phase", FORWARD),
            "module": getattr(self.role_of.get(node), "name", None) or name.split("/")[0],
        }

        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            emitted = self._emit(target, args, kwargs, about)
            meta(emitted)["placements"] = ()  # set below for the last one
            return emitted

        value = redistribute_over(emit, new, shape, current, wanted, self.mesh)
        if value is not new:
            meta(value)["placements"] = (wanted,)
        self.placed[key] = value
        return value


def _squeezed_dims(node: fx.Node) -> list[int]:
    """The dimensions a squeeze removes, read off the global shape: a local size of 1 is no reason."""
    shape = meta(node.args[0])["val"].shape  # type: ignore[union-attr]
    given: Any = range(len(shape)) if node.target is aten.squeeze.default else node.args[1]
    return [dim for dim in ([given] if isinstance(given, int) else given) if shape[dim] == 1]
