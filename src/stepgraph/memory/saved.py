"""What waits for the backward in memory of its own: of that, some may wait on the host.

What is read of a view is the memory that it shows: that is what waits.
"""

import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.errors import name_a_few
from stepgraph.operators.views import viewed
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program


def storage_of(node: fx.Node, awaited: bool = False) -> fx.Node:
    """The operation whose memory a value lies in: of one of several results, that result itself.

    Args:
        awaited: what a collective gives is the wait's, behind which it is there.
    """
    while (source := viewed(node)) is not None:
        is_several = isinstance(meta(source).get("val"), (tuple, list))
        is_one_of_several = node.target is operator.getitem and is_several
        if is_one_of_several or (awaited and node.target is torch_internals.WAIT):
            return node
        node = source
    return node


def shown_in_forward(value: fx.Node) -> list[fx.Node]:
    """A value, and the views of it that the forward takes, in order."""
    found = [value]
    for node in found:
        found += [u for u in node.users if viewed(u) is node and is_forward(u) and u not in found]
    return sorted(found)


def is_forward(node: fx.Node) -> bool:
    """Whether an operation is the forward's."""
    return node.op == "call_function" and meta(node)["phase"] == FORWARD


def is_behind(node: fx.Node) -> bool:
    """Whether an operation runs behind the forward."""
    return node.op == "call_function" and meta(node)["phase"] != FORWARD


def saved_values(program: Program, recompute: Collection[str]) -> list[fx.Node]:
    """Forward values that are there when the backward runs, by what holds them; in order.

    Args:
        recompute: names of what is computed again: what that is computed of waits instead.
    """
    stack = [
        source
        for node in program.operations()
        if not is_forward(node)
        for source in node.all_input_nodes
    ]
    met: set[fx.Node] = set()
    saved: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in met or not is_forward(node):
            continue
        met.add(node)
        if meta(node)["name"] in recompute:
            stack += node.all_input_nodes
        else:
            saved.add(storage_of(node, awaited=True))
    return [node for node in program.operations(FORWARD) if node in saved]


def offloaded(
    program: Program, recompute: Collection[str], wanted: Iterable[fx.Node]
) -> tuple[tuple[str, ...], list[str]]:
    """Which values wait on the host, by name; and notes on what was asked for in vain.

    Args:
        recompute: names of what is computed again.
        wanted: operations whose results are to wait there; views have no memory that could.
    """
    wanted = {*wanted}
    saved = [node for node in saved_values(program, recompute) if node in wanted]
    parameters = {n for role, n, _ in program.input_rows if isinstance(role, roles.Param)}
    saved = [node for node in saved if _is_activation(node, parameters)]
    behind = first_behind(program)
    why_not = {node: obstacle(node, behind) for node in saved}
    stays: dict[str, list[str]] = {}
    for node, why in why_not.items():
        if why:
            stays.setdefault(why, []).append(meta(node)["name"])
    notes = [
        f"memory: {why}, and is not offloaded: {name_a_few(names, at_most=3)}"
        for why, names in stays.items()
    ]
    return tuple(sorted(meta(node)["name"] for node, why in why_not.items() if not why)), notes


def first_behind(program: Program) -> fx.Node | None:
    """The first operation that is not the forward's."""
    return next(filter(is_behind, program.operations()), None)


def obstacle(value: fx.Node, behind: fx.Node | None) -> str:
    """Why a forward value has to stay on the device; empty: it need not.

    Args:
        behind: the first operation that is not the forward's.
    """
    if not isinstance(meta(value)["val"], torch.Tensor):
        return "an operation with several results has no memory of its own"
    shown = shown_in_forward(value)
    users = {user for node in shown for user in node.users}
    if any(user.op == "output" for user in users):
        return "a result of the step stays on the device"
    if behind is not None and any(is_forward(user) and behind < user for user in users):
        return "what the forward reads while the backward runs stays on the device"
    return ""


def comes_from(node: object, parameters: set[fx.Node]) -> bool:
    """Whether a value is a parameter, or views and casts of one alone."""
    while isinstance(node, fx.Node) and node not in parameters:
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return isinstance(node, fx.Node)


def _is_activation(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """A tensor that depends on the batch: not a number, a constant, or a parameter in another type."""
    value = meta(node)["val"]
    made = isinstance(value, torch.Tensor) and value.dim() > 0 and bool(node.all_input_nodes)
    return made and not comes_from(node, parameters)
