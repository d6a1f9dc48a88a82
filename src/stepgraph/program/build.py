"""Adding operations to a graph, with shapes computed on fake tensors once per distinct call and mode."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph import torch_internals
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import Program, Value, tensors_of
from stepgraph.program.roles import Input, label
from stepgraph.torch_internals import operators as private
from stepgraph.torch_internals.code import call_node

aten = torch.ops.aten


class ShapeRunner:
    """Computes the ``val`` of operations on fake tensors; repeated layers, and passes, cost one run."""

    def __init__(self, graph: fx.Graph) -> None:
        values = (meta(node).get("val") for node in graph.nodes)  # the first few say it
        self.mode = torch_internals.fake_mode_of(values) or torch_internals.new_fake_mode()
        self.known = torch_internals.known_shapes(self.mode)

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``target`` on the ``val`` of the nodes among its arguments."""
        key = (target, freeze(args), freeze(kwargs))
        made = self.known.get(key)
        if made is None and key not in self.known:
            fakes, fake_kwargs = map_arg((args, kwargs), lambda a: meta(a)["val"])
            with self.mode:
                made = self.known[key] = target(*fakes, **fake_kwargs)
        return made


def following(node: fx.Node) -> fx.Node:
    """What comes behind an operation; its results stay with it."""
    node = node.next
    while node.target is operator.getitem:
        node = node.next
    return node


class Builder:
    """Appends operations of one phase to a Program's graph, before ``point``.

    Args:
        program: rewritten in place.
        phase: phase of the new operations.
        point: the node that they go before; the end of the graph by default.
    """

    def __init__(self, program: Program, phase: str, point: fx.Node | None = None) -> None:
        self.program, self.graph, self.phase = program, program.graph, phase
        self.point = point or program.graph.output_node()
        self.shapes = ShapeRunner(program.graph)
        self.module = ""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emits one operation."""
        with self.graph.inserting_before(self.point):
            node = call_node(self.graph, target, args, kwargs)
        value = self.shapes.run(target, args, kwargs)
        set_meta(node, {"val": value, "phase": self.phase, "module": self.module})
        return node

    def spell(self, function: Callable[..., Any], *args: Any, on_host: bool = False) -> Any:
        """Emits the operations of a function of tensors, in the order in which it calls them.

        Args:
            function: takes nested tuples of tensors and constants; its identity says what it computes.
            args: the same, of nodes.
            on_host: the function asks for gradients, for which the device would have to be there: see what
                it calls on the host, and call that.

        Returns:
            what it returns, of nodes; None and numbers stay what they are.
        """
        nodes = [leaf for leaf in _leaves(args) if isinstance(leaf, fx.Node)]
        host, device = torch_internals.host_device(), meta(nodes[0])["val"].device
        key = (function, freeze(args))
        known = self.shapes.known
        if key not in known:
            known[key] = torch_internals.trace(
                lambda tensors: function(*_filled(args, iter(tensors))),
                [meta(node)["val"] for node in nodes],
                self.shapes.mode,
                host if on_host else None,
            )
        graph, tree = known[key]
        new = dict(zip((n for n in graph.nodes if n.op == "placeholder"), nodes, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                made = map_arg((node.args, node.kwargs), new.__getitem__)
                kwargs = {k: device if on_host and x == host else x for k, x in made[1].items()}
                new[node] = self(node.target, *made[0], **kwargs)
        results = map_arg(graph.output_node().args[0], new.__getitem__)
        return torch_internals.pytree.tree_unflatten(list(results), tree)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node in another type; itself where it has that type."""
        if meta(node)["val"].dtype == dtype:
            return node
        return self(private.TO_COPY, node, dtype=dtype)

    def input(self, role: Input, shape: Sequence[int], dtype: torch.dtype, device: Any) -> fx.Node:
        """Adds an input behind the last one."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.target = node.name  # the argument's name; only the node's is made unique
        with self.shapes.mode:
            made = torch.empty(tuple(shape), dtype=dtype, device=device)
        set_meta(node, {"val": made, "name": label(role)})
        self.program.inputs.append(role)
        self.program.input_values.append(Value.of(node))
        return node


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, (tuple, list)):
        return [leaf for item in args for leaf in _leaves(item)]
    return [args]


def _filled(args: Any, values: Iterator[Any]) -> Any:
    """The arguments with values in place of nodes, in order."""
    if isinstance(args, (tuple, list)):
        items = [_filled(item, values) for item in args]
        return type(args)(*items) if hasattr(args, "_fields") else type(args)(items)
    return next(values) if isinstance(args, fx.Node) else args


def freeze(argument: Any) -> Any:
    """A hashable stand-in for an argument: what the shape of a result can depend on."""
    kind = type(argument)
    if kind is tuple:
        return tuple(map(freeze, argument))
    if kind in _FROZEN:  # the type, because 1 == True
        return kind, argument
    if kind is fx.Node:
        value = meta(argument)["val"]
        try:
            return (value._stepgraph_kind,)  # of one tensor that was asked for before
        except AttributeError:
            return tuple(kind_of(t) for t in tensors_of(value))
    if isinstance(argument, (tuple, list)):
        return tuple(map(freeze, argument))
    if isinstance(argument, dict):
        return tuple((key, freeze(item)) for key, item in argument.items())
    if isinstance(argument, slice):
        return (argument.start, argument.stop, argument.step)
    # The type, because 1 == 1.0 == True; the text, because nan != nan.
    return (type(argument).__name__, str(argument))


_FROZEN = {int, bool, str, type(None), torch.dtype, torch.device}


def kind_of(tensor: Any) -> Any:
    """Shape, strides, type and device, looked up once: each is asked for by every pass."""
    try:
        return tensor._stepgraph_kind
    except AttributeError:
        kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        tensor._stepgraph_kind = kind
        return kind
