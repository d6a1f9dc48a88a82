"""What a plan remembers of each value, so that it can be explained without the model.

Gathered once, from the global Program (types, readers) and the placed one (collectives).
"""

from collections import Counter
from dataclasses import dataclass

from torch import fx

from stepgraph.cost.collectives import collective_of
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.fingerprint import type_of
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.layout import Placements, show
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments, tensors_of

_READERS_SHOWN = 3


@dataclass(frozen=True)
class Reads:
    """A value is read in one placement: by how many operations, and the first of them by name."""

    placement: str
    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Moves:
    """Collectives that a value causes: ``bytes`` is the larger side of one of them, on one rank."""

    phase: str
    kind: str
    mesh_dim: str
    bytes: int
    count: int


@dataclass(frozen=True)
class ValueFacts:
    """One value: its type with global shape (``bfloat16[32, 4096]``), readers, collectives."""

    type: str
    reads: tuple[Reads, ...] = ()
    moves: tuple[Moves, ...] = ()


def gather_facts(
    program: Program, placed: Program, decision: PlacementDecision
) -> dict[str, ValueFacts]:
    """What is to be remembered of every value, by label (inputs, outputs) or stable name.

    Args:
        program: with global shapes, as the decision was made for it.
        placed: one rank's own, recomputation included.
        decision: names what is in both.
    """
    reads = _reads(program, decision)
    moves = _moves(placed, decision)
    found = {}
    labels = _labels(program)
    for node in program.graph.nodes:
        name = labels.get(node) or meta(node).get("name")
        if name is not None and node.op in ("placeholder", "call_function"):
            found[name] = ValueFacts(_types(node), reads.get(name, ()), moves.get(name, ()))
    for role, node, _ in program.output_rows:
        found[roles.label(role)] = ValueFacts(_types(node))
    return found


def _types(node: fx.Node) -> str:
    return ", ".join(map(type_of, tensors_of(meta(node).get("val"))))


def _labels(program: Program) -> dict[fx.Node, str]:
    return {node: roles.label(role) for role, node, _ in program.input_rows}


def _reads(program: Program, decision: PlacementDecision) -> dict[str, tuple[Reads, ...]]:
    labels = _labels(program)
    found: dict[str, dict[Placements, list[str]]] = {}
    for node in program.operations():
        choice = decision.operations[meta(node)["name"]]
        wanted = iter(choice.inputs)
        for argument in tensor_arguments(node):
            placements = next(wanted, None)
            if placements is None:
                break
            name = labels.get(argument) or meta(argument).get("name", "")
            by_placement = found.setdefault(name, {})
            by_placement.setdefault(placements, []).append(meta(node)["name"])
    for role, node, _ in program.output_rows:
        placements = decision.outputs[roles.label(role)]
        name = labels.get(node) or meta(node).get("name", "")
        found.setdefault(name, {}).setdefault(placements, []).append(roles.label(role))
    return {
        name: tuple(
            Reads(show(placements), len(readers), tuple(dict.fromkeys(readers))[:_READERS_SHOWN])
            for placements, readers in by_placement.items()
        )
        for name, by_placement in found.items()
    }


def _moves(placed: Program, decision: PlacementDecision) -> dict[str, tuple[Moves, ...]]:
    labels = _labels(placed)
    counts: dict[str, Counter[tuple[str, str, str, int]]] = {}
    for node in filter(is_collective, placed.operations()):
        kind, size, mesh_dim = collective_of(node)
        by_kind = counts.setdefault(_cause(node, labels, decision), Counter())
        by_kind[meta(node)["phase"], kind, mesh_dim, size] += 1
    return {
        name: tuple(Moves(*key, count) for key, count in by_kind.items())
        for name, by_kind in counts.items()
    }


def _cause(node: fx.Node, labels: dict[fx.Node, str], decision: PlacementDecision) -> str:
    """The value that a collective redistributes: behind the helpers that placement inserted."""
    source = node
    while True:
        source = source.all_input_nodes[0]
        if source in labels:
            return labels[source]
        name = meta(source).get("recomputed_from", meta(source).get("name", ""))
        if name in decision.operations or not source.all_input_nodes:
            return name
