"""A step with fewer of its repeated layers, from its operations alone.

What a step takes is a head's part and so much a layer: two short steps say what a deep one takes. Forward
and backward are read as texts (:mod:`stepgraph.analysis.blocks`); a stretch of whole layers is taken out of
both, and whoever read one of their values reads that of the layer beside them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from stepgraph.analysis.blocks import crossing_bytes, letter, repetitions
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, OPTIMIZER, Program
from stepgraph.torch_internals.code import copy_node, graph_module

Layer = list[fx.Node]


@dataclass(frozen=True)
class Layers:
    """Layers of a step that do the same, in order of the forward.

    What each does in the forward, and in the backward; all but the first and the last can be taken out.
    """

    program: Program
    forward: list[Layer]
    backward: list[Layer]

    @property
    def most(self) -> int:
        """How many can be taken out."""
        return len(self.forward) - 2

    def without(self, count: int) -> Program:
        """The step without so many layers, with the names of what is left.

        Their parameters and states, and what becomes of them, are gone; a sum over all gradients keeps its
        length.
        """
        instead: dict[fx.Node, fx.Node] = {}
        for number in range(1, count + 1):
            instead |= zip(self.forward[number], self.forward[0], strict=True)
            instead |= zip(self.backward[number], self.backward[count + 1], strict=True)
        program = self.program
        gone = {
            role.name
            for role, node, _ in program.input_rows
            if isinstance(role, roles.Param) and _is_of(node, instead)
        }
        outputs = [row for row in program.output_rows if _belongs_to(row[0]) not in gone]
        kept = _needed((node for _, node, _ in outputs), instead)
        inputs = [
            (role, node, value)
            for role, node, value in program.input_rows
            if node in kept or _belongs_to(role) not in gone
        ]
        kept |= {node for _, node, _ in inputs}
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in program.graph.nodes:
            if node in kept and node.op != "output":
                new[node] = copy_node(graph, node, lambda a: new[instead.get(a, a)])
        last = graph.output(tuple(new[instead.get(node, node)] for _, node, _ in outputs))
        meta(last).update(meta(program.graph.output_node()))
        return replace(
            program,
            module=graph_module(program.module, graph),
            inputs=[role for role, _, _ in inputs],
            outputs=[role for role, _, _ in outputs],
            input_values=[value for _, _, value in inputs],
            output_values=[value for _, _, value in outputs],
            notes=list(program.notes),
        )


def find_layers(program: Program) -> Layers | None:
    """The repeated layers of a step; None where fewer than three are alike in forward and backward."""
    forward, backward = (layers_of(program, phase) for phase in (FORWARD, BACKWARD))
    number = {node: i for i, layer in enumerate(forward) for node in layer}
    reads = [_layer_of(layer, number) for layer in backward]
    best: list[tuple[int, int]] = []  # (layer, its place in the backward)
    run: list[tuple[int, int]] = []
    for place, layer in enumerate(reads):
        run = [*run, (layer, place)] if run and layer == run[-1][0] - 1 else [(layer, place)]
        best = run if len(run) > len(best) and layer >= 0 else best
    if len(best) < 3:
        return None
    best.reverse()
    return Layers(program, [forward[i] for i, _ in best], [backward[j] for _, j in best])


def layers_of(program: Program, phase: str) -> list[Layer]:
    """The repeated layers of a phase, in its order; of several kinds those that are most of it."""
    nodes = list(program.operations(phase))
    edges = next(repetitions([letter(node) for node in nodes], crossing_bytes(nodes)), [])
    return [nodes[start:stop] for start, stop in pairwise(edges)]


def _layer_of(backward: Layer, number: dict[fx.Node, int]) -> int:
    """The layer of the forward that a stretch of the backward reads most of; -1: none."""
    read = Counter(number[n] for node in backward for n in node.all_input_nodes if n in number)
    return read.most_common(1)[0][0] if read else -1


def _is_of(parameter: fx.Node, instead: dict[fx.Node, fx.Node]) -> bool:
    """Whether a parameter is read by what is taken out, and updated, and nothing else."""
    readers = [user for user in parameter.users if meta(user).get("phase") != OPTIMIZER]
    return bool(readers) and all(reader in instead for reader in readers)


def _belongs_to(role: roles.Input | roles.Output) -> str | None:
    """The parameter without which an input or result is not there."""
    match role:
        case roles.OptimizerState(owner=name) | roles.NewOptimizerState(owner=name):
            return name
        case roles.Param(name) | roles.NewParam(name) | roles.Grad(name) | roles.GivenGrad(name):
            return name
        case roles.Accumulator(name) | roles.NewAccumulator(name):
            return name.removeprefix("grad:")
    return None


def _needed(results: Iterable[fx.Node], instead: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Everything that results are made of."""
    found: set[fx.Node] = set()
    stack = [instead.get(node, node) for node in results]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [instead.get(source, source) for source in node.all_input_nodes]
    return found
