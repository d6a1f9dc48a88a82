"""The part of an optimizer's step that is arithmetic on whole tensors, as the text of one operation."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from stepgraph.operators import table as operators
from stepgraph.operators.scalar_functions import Overload, Shown
from stepgraph.program.metadata import meta


@dataclass(frozen=True)
class Update:
    """What a step does to whole tensors, element by element.

    Attributes:
        text: what :data:`stepgraph.operators.updates.UPDATE` takes.
        tensors: which of the step's tensors ``t0``, ``t1``, ... are.
        numbers: which of its 0-dim values ``n0``, ``n1``, ... are.
        results: which of its values are returned.
    """

    text: str
    tensors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def update_in(graph: fx.Graph) -> Update | None:
    """What an optimizer's step does to whole tensors; None where it is not all element by element.

    Args:
        graph: functional, of (parameter, gradient, *states, *numbers) to (parameter, *states).
    """
    whole = [node for node in graph.nodes if _dims(node)]
    shape = _shape(whole[0]) if whole else ()
    computed = [node for node in whole if node.op == "call_function"]
    if not computed or not all(_is_elementwise(node, shape) for node in computed):
        return None
    among = {*computed}
    others = [node for node in graph.nodes if node.op == "call_function" and node not in among]
    if any(_dims(source) for node in others for source in node.all_input_nodes):
        return None  # a number that is made of a tensor: a norm
    returned = [node for node in graph.output_node().args[0] if node in among]  # type: ignore[union-attr]
    results = tuple(dict.fromkeys(returned))
    read = {source for node in computed for source in node.all_input_nodes} - among
    inputs = [node for node in graph.nodes if node in read]
    tensors = tuple(node for node in inputs if _dims(node))
    numbers = tuple(node for node in inputs if not _dims(node))
    if any(node.op == "get_attr" for node in tensors):
        return None
    return Update(_text(computed, tensors, numbers, results), tensors, numbers, results)


def _dims(node: fx.Node) -> int:
    return len(_shape(node))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of a tensor; a constant that has none in its metadata is a number."""
    value = meta(node).get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _is_elementwise(node: fx.Node, shape: tuple[int, ...]) -> bool:
    target = node.target
    return (
        isinstance(target, Overload)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and operators.of(target).elementwise
        and not operators.of(target).draws
        and _shape(node) == shape
        and all(_shape(source) in ((), shape) for source in node.all_input_nodes)
    )


def _text(
    computed: Sequence[fx.Node],
    tensors: Sequence[fx.Node],
    numbers: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> str:
    """A function that holds no value much longer than it is needed: names are used again."""
    names: dict[fx.Node, Any] = {node: Shown(f"t{i}") for i, node in enumerate(tensors)}
    names |= {node: Shown(f"n{i}") for i, node in enumerate(numbers)}
    takes = ", ".join(map(repr, names.values()))
    last = {source: node for node in computed for source in node.all_input_nodes}
    lines: list[str] = []
    free: list[Shown] = []
    new = itertools.count()
    for node in computed:
        args, kwargs = map_arg((list(node.args), node.kwargs), names.__getitem__)
        shown = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        over = [n for n in node.all_input_nodes if last[n] is node and n in computed]
        free += [names[n] for n in over if n not in results]
        names[node] = free.pop() if free else Shown(f"v{next(new)}")
        lines.append(f"{names[node]!r} = {node.target}({', '.join(shown)})")
    returned = ", ".join(repr(names[node]) for node in results)
    return f"def f({takes}): {'; '.join([*lines, f'return [{returned}]'])}"
