"""Attention masks that hide what comes later, however they are spelt, become ``is_causal``.

A library that is traced writes such a mask out, ``[rows, 1, length, length]``, and every layer reads it: at
8,192 tokens it is larger than all activations of the layer, and the kernel does twice the products.
A mask is known by what it is computed from, in time linear in the length: positions are vectors, and a
comparison of two of them is recognised by counting, without being computed.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.operators.attention import ATTENTION, ATTENTION_BACKWARD
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

LARGEST_VECTOR = 2**22  # elements; positions of a batch are far fewer


class Shape(enum.Enum):
    """What a square of the last two dimensions (queries x keys) holds."""

    ALL = "true"
    CAUSAL = "true where a key does not come after its query"
    LATER = "true where it does"
    BIAS = "nothing added where CAUSAL, minus infinity where LATER"


@program_pass(
    reads="what masks are computed from",
    writes="arguments of attention and of its backward",
    preserves=SUMMATION,
)
def recognise_masks(program: Program) -> Program:
    """Attention reads ``is_causal`` in place of a mask of constants that says so, none if it hides nothing.

    What is left out of the kernel's sums is zero.
    """
    constants = _Constants()
    for node in program.operations():
        mask = node.args[_MASK[node.target]] if node.target in _MASK else None
        if not isinstance(mask, fx.Node):
            continue
        found = constants.of(mask)
        if found in (Shape.BIAS, Shape.CAUSAL):
            _rewrite(node, causal=True)
        elif found is Shape.ALL or _everywhere(found, meta(mask)["val"].dtype == torch.bool):
            _rewrite(node, causal=False)
    return program.finish()


# The operator: where its arguments have the mask; ``is_causal`` is the third from the end.
_MASK: dict[Any, int] = {ATTENTION: 3, ATTENTION_BACKWARD: 4}
_CAUSAL = -3


def _rewrite(node: fx.Node, causal: bool) -> None:
    args = list(node.args)
    args[_MASK[node.target]] = None
    args[_CAUSAL] = causal or args[_CAUSAL]
    node.args = tuple(args)


class _Constants:
    """Values that depend on no input: tensors, expanded where they repeat, or what squares hold."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor | Shape | None] = {}

    def of(self, node: fx.Node) -> torch.Tensor | Shape | None:
        """The value, or None: it depends on an input, or nobody here knows its operator."""
        waiting = [node]
        while waiting:
            current = waiting[-1]
            missing = [a for a in _read(current) if a not in self._known]
            if missing and current not in self._known:
                waiting += missing
                continue
            waiting.pop()
            if current not in self._known:
                self._known[current] = self._evaluate(current)
        return self._known[node]

    def _evaluate(self, node: fx.Node) -> torch.Tensor | Shape | None:
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            return None
        operands = [self._known[argument] for argument in _read(node)]
        if any(operand is None for operand in operands):
            return None
        return rule(node, *operands)


def _read(node: fx.Node) -> list[fx.Node]:
    """Arguments whose values matter: a factory reads no more than the shape of its own."""
    return [] if node.target in _FACTORIES else node.all_input_nodes


def _computed(node: fx.Node, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The operator's own result, on operands that are narrowed to one where all of them repeat."""
    result = meta(node)["val"]
    along = node.args[1] if node.target in _ALONG else None
    if node.target is aten.cat.default:
        along = node.args[1] if len(node.args) > 1 else 0
    narrow = list(operands)
    for dim in range(result.dim()):
        back = result.dim() - dim  # counted from the end, as broadcasting does
        if along is not None and dim == along % result.dim():
            continue
        if all(x.dim() < back or x.stride(-back) == 0 or x.shape[-back] == 1 for x in operands):
            narrow = [x if x.dim() < back else x.narrow(x.dim() - back, 0, 1) for x in narrow]
    together = node.target is not aten.cat.default
    shape = torch.broadcast_shapes(*(x.shape for x in narrow)) if together else result.shape
    if math.prod(shape) > LARGEST_VECTOR:
        return None
    values = dict(zip(node.all_input_nodes, narrow, strict=True))
    args = map_arg(node.args, values.__getitem__)
    kwargs = {key: value for key, value in node.kwargs.items() if key == "dtype"}
    return node.target(*args, **kwargs).expand(result.shape)  # type: ignore[operator]


def _vector_rule(node: fx.Node, *operands: Any) -> torch.Tensor | None:
    if any(isinstance(operand, Shape) for operand in operands):
        return None
    return _computed(node, operands)


def _distinct(x: torch.Tensor) -> list[int]:
    """The shape, with one where a dimension repeats."""
    return [n if stride else 1 for n, stride in zip(x.shape, x.stride(), strict=True)]


def _view_rule(node: fx.Node, x: torch.Tensor | Shape) -> torch.Tensor | Shape | None:
    """A square stays one while its last two dimensions stay."""
    if isinstance(x, Shape):
        source = meta(node.all_input_nodes[0])["val"].shape
        return x if meta(node)["val"].shape[-2:] == source[-2:] else None
    try:
        return node.target(x, *node.args[1:])  # type: ignore[operator]
    except RuntimeError:  # what repeats has no view of this shape
        return None


def _factory_rule(node: fx.Node) -> torch.Tensor | None:
    result = meta(node)["val"]
    if node.target in _COUNTERS:
        if result.numel() > LARGEST_VECTOR:
            return None
        return torch.arange(*node.args, dtype=result.dtype)  # type: ignore[arg-type]
    number = _FILLED[node.target](node)
    return torch.full((), number, dtype=result.dtype).expand(result.shape)


def _comparison_rule(node: fx.Node, *operands: Any) -> torch.Tensor | Shape | None:
    """Two vectors, one along the keys and one along the queries; anything else is computed."""
    if len(operands) != 2 or any(isinstance(operand, Shape) for operand in operands):
        return _vector_rule(node, *operands)
    result = meta(node)["val"]
    square = result.dim() >= 2 and result.shape[-1] == result.shape[-2] > 1
    found = [_along(x) for x in operands] if square else []
    if set(found) != {-1, -2}:
        return _vector_rule(node, *operands)
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    if found[0] == -2:  # queries op keys: the other way round
        operands, name = operands[::-1], _MIRRORED.get(name, name)
    keys, queries = (x[(0,) * (x.dim() - 2)].flatten() for x in operands)
    if name == "eq":
        return Shape.ALL if (keys == keys[0]).all() and (queries == keys[0]).all() else None
    if not (keys[1:] > keys[:-1]).all():
        return None
    strict = name in ("lt", "ge")
    fewer = torch.searchsorted(keys.contiguous(), queries.contiguous(), right=not strict)
    if not torch.equal(fewer, torch.arange(1, len(keys) + 1)):
        return None
    return Shape.CAUSAL if name in ("le", "lt") else Shape.LATER


def _along(x: torch.Tensor) -> int | None:
    """The one of the last two dimensions that a vector lies along."""
    dims = [dim - x.dim() for dim, n in enumerate(_distinct(x)) if n > 1]
    return dims[0] if len(dims) == 1 else None


_MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}


def _and_rule(node: fx.Node, *operands: Any) -> Any:
    squares = {x for x in operands if isinstance(x, Shape)}
    if not squares:
        return _vector_rule(node, *operands)
    if not all(_everywhere(x, True) for x in operands if not isinstance(x, Shape)):
        return None
    squares -= {Shape.ALL}
    return squares.pop() if len(squares) == 1 else None if squares else Shape.ALL


def _everywhere(x: Any, *values: float) -> bool:
    """Whether a tensor holds one of these values and no other."""
    if not isinstance(x, torch.Tensor):
        return False
    kept = x[tuple(slice(None if stride else 1) for stride in x.stride())]
    return any(bool((kept == value).all()) for value in values)


def _not_rule(node: fx.Node, x: Any) -> Any:
    if isinstance(x, Shape):
        return {Shape.CAUSAL: Shape.LATER, Shape.LATER: Shape.CAUSAL}.get(x)
    return _vector_rule(node, x)


def _where_rule(node: fx.Node, condition: Any, *values: Any) -> Any:
    if len(values) == 2 and condition is Shape.ALL:
        return values[0].expand(meta(node)["val"].shape)
    if isinstance(condition, torch.Tensor):
        return _vector_rule(node, condition, *values)
    if len(values) != 2 or condition not in (Shape.CAUSAL, Shape.LATER):
        return None
    seen, hidden = values if condition is Shape.CAUSAL else values[::-1]
    return Shape.BIAS if _everywhere(seen, 0.0) and _hides(hidden) else None


def _hides(x: Any) -> bool:
    """Minus infinity, or the least number there is: a score plus that is no more than zero as a weight."""
    return isinstance(x, torch.Tensor) and _everywhere(x, -torch.inf, torch.finfo(x.dtype).min)


def _triangle_rule(node: fx.Node, x: Any) -> Shape | None:
    """``tril(ones)``, ``triu(ones, 1)``, and ``triu`` of minus infinity."""
    if not isinstance(x, torch.Tensor) or x.shape[-1] != x.shape[-2]:
        return None
    upper = node.target is aten.triu.default
    if (node.args[1] if len(node.args) > 1 else 0) != int(upper):
        return None
    if x.dtype == torch.bool and _everywhere(x, True):
        return Shape.LATER if upper else Shape.CAUSAL
    return Shape.BIAS if upper and x.dtype.is_floating_point and _hides(x) else None


def _cast_rule(node: fx.Node, x: Any) -> Any:
    if not isinstance(x, Shape):
        return _vector_rule(node, x)
    dtype = meta(node)["val"].dtype
    return x if dtype.is_floating_point == (x is Shape.BIAS) else None


_COUNTERS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
    **dict.fromkeys(
        (aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: 1
    ),
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda node: 0
    ),
}
_FACTORIES = {*_COUNTERS, *_FILLED}
_ALONG = {aten.cat.default, aten.cumsum.default, aten.index_select.default}
_RULES: dict[Any, Callable[..., torch.Tensor | Shape | None]] = {
    **dict.fromkeys(_FACTORIES, _factory_rule),
    **dict.fromkeys(
        (
            aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.view.default,
            aten.slice.Tensor, aten.select.int, aten.alias.default,
        ),
        _view_rule,
    ),
    **dict.fromkeys(_ALONG, _vector_rule),
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.ne.Tensor, aten.clone.default,
            aten.eq.Scalar, aten.ne.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar,
            aten.gt.Scalar,
        ),
        _vector_rule,
    ),
    **dict.fromkeys(
        (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor),
        _comparison_rule,
    ),
    aten.bitwise_and.Tensor: _and_rule, aten.logical_and.default: _and_rule,
    aten.bitwise_not.default: _not_rule, aten.logical_not.default: _not_rule,
    aten.where.self: _where_rule,
    aten.triu.default: _triangle_rule, aten.tril.default: _triangle_rule,
    private.TO_COPY: _cast_rule,
}  # fmt: skip
