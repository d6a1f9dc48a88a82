"""Numbers that code reads from tensors (``.item()``, ``float(x)``): they stay tensors, without a gradient.

Then they are those of the global batch, as every tensor of a Program is; what Python read on a rank would
be that rank's own. dynamo holds such a number as a symbol, and what is computed of it as nodes of its
graph. Where it is used as anything else (a size, a branch), the model cannot be captured whole.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.capture.refusals import line_in
from stepgraph.errors import GraphBreakError
from stepgraph.torch_internals import export

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _bound(of_tensors: Callable, of_one: str) -> Callable:
    """The larger or smaller of two numbers, one of which may be Python's."""

    def chosen(a: Any, b: Any) -> torch.Tensor:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return of_tensors(a, b)
        number, limit = (a, b) if isinstance(a, torch.Tensor) else (b, a)
        return torch.clamp(number, **{of_one: limit})

    return chosen


def _power(base: Any, exponent: Any) -> torch.Tensor:
    if isinstance(exponent, int) and exponent < 0:
        base = _floating(base)  # as Python's integers become
    return base**exponent


def _floating(number: torch.Tensor) -> torch.Tensor:
    return number if number.is_floating_point() else number.double()


# What computes a number of numbers -> what does the same to 0-dim tensors.
_ARITHMETIC: dict[Any, Callable] = {
    **{
        same: same
        for same in (
            operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
            operator.mod, operator.neg, operator.pos, operator.abs,
        )
    },
    operator.pow: _power,
    torch.sym_float: _floating,
    torch.sym_int: torch.Tensor.long,
    torch.sym_max: _bound(torch.maximum, "min"),
    torch.sym_min: _bound(torch.minimum, "max"),
    torch.sym_sqrt: torch.sqrt,
}  # fmt: skip
_IN_PLACE = {"imul", "iadd", "isub", "itruediv"}
# Operations on tensors that take a 0-dim tensor where they take a number.
_TAKE_TENSORS = {
    "add", "sub", "mul", "div", "truediv", "true_divide", "pow", "clamp", "clamp_min", "clamp_max", "where",
    "masked_fill", "lerp", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "mod", "rsub", "neg", "multiply",
    "divide", "subtract", *_IN_PLACE,
}  # fmt: skip
_NAMED = {"min", "max", "value", "other", "weight", "exponent"}


def keep_as_tensors(graph: fx.GraphModule) -> set[int]:
    """Rewrites a graph of dynamo's, and those inside it, so that no number is read.

    Returns:
        which of the results are numbers: 0-dim tensors now.

    Raises:
        GraphBreakError: a number is used as something else, or a size depends on data; it names the line.
    """
    returned: set[int] = set()
    for module in [m for m in graph.modules() if isinstance(m, fx.GraphModule)]:
        numbers: set[fx.Node] = set()
        for node in list(module.graph.nodes):
            value = export.example_value(node)
            if isinstance(value, torch.Tensor) and any(
                isinstance(size, torch.SymInt) for size in value.shape
            ):
                raise _break(node, "the shape of a tensor depends on data")
            read = numbers.intersection(node.all_input_nodes)
            if export.reads_number(node):
                _keep(node)
                numbers.add(node)
            elif export.is_assertion(node) or (isinstance(value, torch.SymBool) and not node.users):
                module.graph.erase_node(node)
            elif node.op == "output" and read and module is graph:
                leaves: Any = node.args[0]
                returned = {i for i, leaf in enumerate(leaves) if leaf in read}
            elif isinstance(value, _SYMBOLS) and read and node.target in _ARITHMETIC:
                node.target = _ARITHMETIC[node.target]
                export.forget_symbols(node)
                numbers.add(node)
            elif isinstance(value, _SYMBOLS) and not _only_asserted(node):
                raise _break(node, "a number that depends on data is used as a size, or to branch")
            elif read and not isinstance(value, _SYMBOLS):
                _hand_over(node, value, read)
        if numbers:
            for node in reversed(module.graph.nodes):
                symbol = node in numbers or isinstance(export.example_value(node), _SYMBOLS)
                if symbol and not node.users:
                    module.graph.erase_node(node)
            module.recompile()
    return returned


def _keep(node: fx.Node) -> None:
    """In place of what reads a tensor: the tensor, as a number is one."""
    node.op, node.target = "call_function", _as_number
    node.args, node.kwargs = node.args[:1], {}
    export.forget_symbols(node)


def _as_number(tensor: torch.Tensor) -> torch.Tensor:
    """As precise as a number in Python is."""
    if tensor.is_floating_point():
        dtype = torch.float64
    else:
        dtype = tensor.dtype if tensor.dtype == torch.bool else torch.int64
    return tensor.detach().reshape(()).to(dtype).clone()


def _only_asserted(node: fx.Node) -> bool:
    return all(
        export.is_assertion(user)
        or (isinstance(export.example_value(user), _SYMBOLS) and _only_asserted(user))
        for user in node.users
    )


def _hand_over(node: fx.Node, value: Any, read: set[fx.Node]) -> None:
    """Lets an operation take 0-dim tensors in place of numbers; its result has the type that it had."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    bounds = (*node.args[1:], *node.kwargs.values()) if name.startswith("clamp") else ()
    placed = read.isdisjoint(v for k, v in node.kwargs.items() if k not in _NAMED)
    if (
        name.rstrip("_") not in _TAKE_TENSORS
        or not isinstance(value, torch.Tensor)
        or not placed
        or sum(bound is not None for bound in bounds) > 1
    ):
        raise _break(node, "a number that depends on data is used where no tensor can be")
    if not value.is_floating_point():
        if value.dtype != torch.bool:
            for number in read:
                _cast(node, number, value.dtype)
        return
    # A number is no less precise than float32, whatever the type of the tensors that it meets.
    dtype = torch.promote_types(value.dtype, torch.float32)
    met = [x for x in node.all_input_nodes if x not in read and dtype != value.dtype]
    if met and name in _IN_PLACE | {name.rstrip("_") + "_"}:
        raise _break(
            node, f"a tensor of {value.dtype} is changed in place by a number that depends on data"
        )
    floating = [x for x in met if export.example_value(x).is_floating_point()]
    for number in (*read, *floating):
        _cast(node, number, dtype)
    if dtype != value.dtype:
        with node.graph.inserting_after(node):
            result = node.graph.call_method("to", (node, value.dtype))
        export.set_example_value(result, value)
        node.replace_all_uses_with(result, lambda user: user is not result)


def _cast(reader: fx.Node, read: fx.Node, dtype: torch.dtype) -> None:
    with reader.graph.inserting_before(reader):
        cast = reader.graph.call_method("to", (read, dtype))
    reader.replace_input_with(read, cast)


def _break(node: fx.Node, why: str) -> GraphBreakError:
    return GraphBreakError(
        "the model cannot be captured as one program",
        where=line_in(export.stack_trace(node) or ""),
        why=why,
        do="keep it in tensors: torch.where in place of a branch, a mask in place of a size",
    )
