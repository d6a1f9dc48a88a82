"""What the solver reads off a global Program: gradients, updates, what varies, what the backward needs."""

from collections.abc import Collection

from torch import fx

from stepgraph.analysis.rows import reached
from stepgraph.operators.views import viewed
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, OPTIMIZER, Program, tensors_of

# Tags of what is done to a gradient on its way into the update.
_OF_GRADIENTS = ("reduced_before", "accumulates", "accumulated_next")


def decided_here(node: fx.Node) -> bool:
    """Whether an operation's placement is the solver's to choose: not the update's, nor a stored cast's."""
    return (
        node.op == "call_function"
        and meta(node)["phase"] != OPTIMIZER
        and not any(tag in meta(node) for tag in _OF_GRADIENTS)
        and not is_stored_cast(node)
    )


def _parameter_of(role: roles.Output) -> str | None:
    """The parameter whose gradient an output is, or is made of."""
    match role:
        case roles.Grad(name) | roles.NewParam(name):
            return name
        case roles.NewAccumulator(name) if name.startswith("grad:"):
            return name.removeprefix("grad:")
    return None


def find_gradients(program: Program) -> dict[fx.Node, str]:
    """Values of the backward that are a parameter's gradient, still to be reduced -> the parameter."""
    found: dict[fx.Node, str] = {}
    for role, result in zip(program.outputs, program.results, strict=True):
        name = _parameter_of(role)
        if name is None:
            continue
        shape = meta(result)["val"].shape
        seen: set[fx.Node] = set()
        stack = [result]
        while stack:
            node = stack.pop()
            made = tensors_of(meta(node).get("val"))
            same = bool(made) and all(tensor.shape == shape for tensor in made)
            if node in seen or node.op != "call_function" or not same:
                continue
            seen.add(node)
            if decided_here(node):
                found[node] = name
            else:
                stack += node.all_input_nodes
    return found


def update_operations(program: Program) -> dict[str, list[fx.Node]]:
    """Operations of the update on values of a parameter's shape, by parameter."""
    found: dict[str, list[fx.Node]] = {}
    for role, result in zip(program.outputs, program.results, strict=True):
        if not isinstance(role, (roles.NewParam, roles.NewOptimizerState)):
            continue
        name = role.name if isinstance(role, roles.NewParam) else role.owner
        known = found.setdefault(name, [])
        stack = [result]
        while stack:
            node = stack.pop()
            if node.op != "call_function" or decided_here(node) or node in known:
                continue
            if is_stored_cast(node) or not any(t.dim() for t in tensors_of(meta(node).get("val"))):
                continue
            known.append(node)
            stack += node.all_input_nodes
    return found


def values_that_vary(program: Program) -> set[fx.Node]:
    """Values that depend on a parameter or the batch."""
    kinds = (roles.Param, roles.UserInput, roles.ResultTangent)
    varying = {node for role, node, _ in program.input_rows if isinstance(role, kinds)}
    return reached(program, varying)


def needed_by_backward(program: Program, recomputed: Collection[str]) -> set[fx.Node]:
    """Forward values that the backward reads, or what it recomputes from; with a view, what it shows."""
    needed: set[fx.Node] = set()
    dropped = frozenset(recomputed)
    stack = [
        source
        for node in program.operations(BACKWARD)
        for source in node.all_input_nodes
        if source.op == "call_function" and meta(source)["phase"] != BACKWARD
    ]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if meta(node)["name"] in dropped or viewed(node) is not None:
            stack += [n for n in node.all_input_nodes if n.op == "call_function"]
    return needed


def is_stored_cast(node: fx.Node) -> bool:
    """Whether an operation casts a parameter where it is stored."""
    return bool(meta(node).get("casts_parameter"))
