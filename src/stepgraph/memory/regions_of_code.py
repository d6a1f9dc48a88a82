"""Stretches of the forward that are recomputed as one: what is dropped of them, and what is kept.

Those under ``torch.utils.checkpoint`` may have a policy of their own
(``create_selective_checkpoint_contexts``), which is kept to: what it saves is saved, and a product that
must be recomputed is, with what it would rather save of it where the backward reads nothing else. What it
offloads is kept on the host.
"""

import operator
from collections.abc import Collection, Iterator

from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.work import node_flops
from stepgraph.memory.saved import is_forward
from stepgraph.operators import table as operators
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program


def find(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """The regions under ``torch.utils.checkpoint`` among forward operations, in order.

    What passes put in the place of a region's operations (a keyed dropout) stands between them, and is the
    region's; of one region in another, the inner one's.
    """
    spans: dict[int, tuple[int, int]] = {}
    for at, node in enumerate(nodes):
        number = meta(node).get("checkpoint")
        if number is not None:
            spans[number] = (spans.get(number, (at, at))[0], at)
    regions: dict[int, list[fx.Node]] = {number: [] for number in spans}
    inner_first = sorted(spans, key=lambda number: spans[number][1] - spans[number][0])
    for at, node in enumerate(nodes):
        number = meta(node).get("checkpoint")
        if number is None:
            around = (n for n in inner_first if spans[n][0] < at < spans[n][1])
            number = next(around, None)
        if number is not None:
            regions[number].append(node)
    return list(regions.values())


def sent_to_host(nodes: list[fx.Node]) -> list[fx.Node]:
    """What regions' own policies keep on the host."""
    return [node for node in nodes if _policy(node).endswith("cpu_offload")]


def not_crossing(
    region: list[fx.Node],
    program: Program,
    kept: Collection[fx.Node] = (),
    communicates: bool = False,
) -> list[fx.Node]:
    """Values of a region that no other part of the forward reads, neither results nor ``kept``.

    Communicated activations are kept, unless they may be communicated twice. So is what a generator drew:
    it would draw something else.
    """
    inside, results = set(region), set(program.results)

    def stays_within(node: fx.Node) -> bool:
        """Or follows from what is kept, as what is communicated of a value does."""
        crosses = any(is_forward(user) and user not in inside for user in node.users)
        return not crosses or (communicates and _is_communicated(node))

    may_go = {
        n for n in region if n not in results and n not in kept and not _is_kept(n, communicates)
    }
    within = {node for node in may_go if stays_within(node)}
    dropped = _dropped(region, {node for node in within if _policy(node).endswith("recompute")})
    for product in dropped:
        if _policy(product) == "must_recompute" and node_flops(product):
            dropped = _with_readers(product, region, dropped, may_go, within)
    return list(dropped)


def _with_readers(
    product: fx.Node,
    region: list[fx.Node],
    dropped: dict[fx.Node, None],
    may_go: set[fx.Node],
    within: set[fx.Node],
) -> dict[fx.Node, None]:
    """Drops what is made of a product at no cost, unless it must be saved, until the backward needs it.

    What leaves the region is dropped where its own backward reads it, as a ``tanh``'s does.
    """
    chain = {product}
    while product not in _recomputed(dropped):
        readers = {user for one in chain for user in one.users} & may_go
        readers = {r for r in readers if _policy(r) == "prefer_save" and not node_flops(r)}
        readers = {r for r in readers if r in within or _needs_itself(r)}
        if readers <= chain:
            break
        chain |= readers
        dropped = _dropped(region, {*dropped, *chain})
    return dropped


def _needs_itself(node: fx.Node) -> bool:
    number = meta(node).get("sequence")
    behind = (user for user in node.users if not is_forward(user))
    return number is not None and any(meta(user).get("sequence") == number for user in behind)


def _is_kept(node: fx.Node, communicates: bool) -> bool:
    return _draws(node) or (_is_communicated(node) and not communicates)


def _is_communicated(node: fx.Node) -> bool:
    return is_collective(node) or node.target is torch_internals.WAIT


def _dropped(region: list[fx.Node], wanted: set[fx.Node]) -> dict[fx.Node, None]:
    """In order; a part of a tuple goes with it: what is kept for the backward are tensors."""
    dropped: dict[fx.Node, None] = {}
    for node in region:
        of_kept = node.target is operator.getitem and node.args[0] not in dropped
        if node in wanted and not of_kept:
            dropped[node] = None
    return dropped


def _recomputed(dropped: dict[fx.Node, None]) -> set[fx.Node]:
    """What the backward reads of dropped values, and what those are made of."""
    reads = (user for node in dropped for user in node.users if not is_forward(user))
    stack = list(_dropped_inputs(reads, dropped))
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += _dropped_inputs([node], dropped)
    return found


def _dropped_inputs(nodes, dropped: dict[fx.Node, None]) -> Iterator[fx.Node]:
    return (source for node in nodes for source in node.all_input_nodes if source in dropped)


def _policy(node: fx.Node) -> str:
    return meta(node).get("region_policy", "prefer_recompute")


def _draws(node: fx.Node) -> bool:
    """Whether a generator decides the result; attention has the tag for a dropout that is not asked for."""
    if not operators.of(node.target).draws:
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    asked = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(asked.get("dropout_p", 0.0))
