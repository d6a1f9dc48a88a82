"""Describes one graph of many as a Program: what dynamo captures between two graph breaks.

AOTAutograd has traced its forward and backward as one, with full shapes and this rank's rows. It keeps
the calling convention of what it traced, so nothing is dropped or reordered here: tensors get roles,
whatever else goes in and out stays in its place.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from stepgraph import torch_internals
from stepgraph.capture.annotations import annotate, settle_phases
from stepgraph.program import roles
from stepgraph.program.layout import Spread
from stepgraph.program.markers import UNSHARD
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program, Value
from stepgraph.torch_internals import pytree

_ATTRIBUTE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\.([A-Za-z_]\w*)")
aten = torch.ops.aten
OTHERS = 1_000_000  # what is no argument or result of the user's: its position follows
_ROOT = re.compile(r"^L\['[^']*'\](\.__self__|\.model)?\.?")


def input_name(source: str) -> str:
    """``layers.weight`` of dynamo's ``L['self']._modules['layers']._parameters['weight']``."""
    return ".".join(a or b for a, b in _ATTRIBUTE.findall(_ROOT.sub(".", source))) or source


class GraphProgram:
    """The Program of one graph, and how to give it back.

    Args:
        joint: forward and backward, as AOTAutograd hands it to a partitioner; it is rewritten in place.
        results: of the forward, the first among its results.
        sources: dynamo's names of the graph's inputs.
        known: positions of inputs -> how ranks have them, as far as it is known.
        rows: of this rank's batch; an unknown input with as many and more dimensions is taken for rows.

    Attributes:
        program: its inputs are ``UserInput`` (activations, the batch), ``Param`` (what ``unshard`` reads),
            ``Buffer`` (what every rank has whole) and ``ResultTangent``; its outputs, tensors only,
            ``ModuleResult`` and ``Grad``.
        spread: how ranks have ``UserInput`` tensors.
        unknown: names of those of which it is not known.
        guessed: some are taken for rows by their shape alone.
        written: indices of results that are new values of inputs -> positions of those.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        results: int,
        sources: Sequence[str],
        known: Mapping[int, Spread] | None = None,
        rows: int = 0,
    ) -> None:
        self._output = joint.graph.output_node()
        leaves = pytree.tree_leaves(self._output.args[0], is_leaf=lambda leaf: leaf is None)
        self._flat = list(leaves)
        self._slots = [i for i, leaf in enumerate(self._flat) if is_tensor(leaf)]
        self.spread: dict[roles.Input, Spread] = {}
        self.unknown: list[str] = []
        self.guessed = False
        self.written: dict[int, int] = {}
        self.program = self._describe(joint, results, list(sources), known or {}, rows)

    def _describe(
        self,
        joint: fx.GraphModule,
        results: int,
        sources: list[str],
        known: Mapping[int, Spread],
        rows: int,
    ) -> Program:
        pairs_in, pairs_out = torch_internals.descriptors(joint)
        inputs: list[roles.Input] = []
        for index, (node, descriptor) in enumerate(pairs_in):
            match torch_internals.describe(descriptor):
                case ("tangent", ("output", result)):
                    inputs.append(roles.ResultTangent(result))
                case ("tangent", _):
                    inputs.append(roles.ResultTangent(OTHERS + index))
                case ("plain", leaf):
                    source = sources[leaf] if leaf < len(sources) else ""
                    role = _role(node, index, source, known.get(leaf))
                    inputs.append(role)
                    if isinstance(role, roles.UserInput) and is_tensor(node):
                        if leaf in known:
                            self.spread[role] = known[leaf]
                        elif meta(node)["val"].dim() > 1 and meta(node)["val"].shape[0] == rows:
                            self.spread[role], self.guessed = Shard(0), True
                        else:
                            self.unknown.append(role.name)
                case _:
                    inputs.append(_role(node, index, ""))
        outputs: list[roles.Output] = []
        for slot in self._slots:
            kind, number = torch_internals.describe(pairs_out[slot][1])
            if slot >= results:
                outputs.append(roles.Grad(f"result {slot}"))
            else:
                outputs.append(roles.ModuleResult(number if kind == "output" else OTHERS + slot))
            if kind == "mutation" and number[0] == "plain":
                self.written[OTHERS + slot] = number[1]
        tensors = [self._flat[slot] for slot in self._slots]
        self._output.args = (tuple(tensors),)
        placeholders = [node for node, _ in pairs_in]
        values = [list(map(Value.of, nodes)) for nodes in (placeholders, tensors)]
        program = Program("graph", joint, inputs, outputs, *values)
        kept = {node: dict(meta(node)) for node in [*placeholders, self._output]}
        for node in joint.graph.nodes:
            annotate(node, _ROOT)
        settle_phases(program)
        for node, described in kept.items():
            set_meta(node, described)
        for node, role in zip(placeholders, inputs, strict=True):
            meta(node)["name"] = roles.label(role)
        name_operations(joint.graph)
        return program

    def give_back(self) -> None:
        """Puts the results where AOTAutograd expects them."""
        for slot, node in zip(self._slots, self.program.results, strict=True):
            self._flat[slot] = node
        self._output.args = (list(self._flat),)


def _role(node: fx.Node, index: int, source: str, how: Spread | None = None) -> roles.Input:
    name = f"{input_name(source)}#{index}"  # one graph may serve several layers: no name is a key
    if _is_parameter(node):
        return roles.Param(name)
    whole = "_buffers[" in source if how is None else isinstance(how, Replicate)
    return roles.Buffer(name) if whole else roles.UserInput(index, name)


def is_tensor(leaf: Any) -> bool:
    """Whether what goes into a graph, or comes out of it, is a tensor."""
    return isinstance(leaf, fx.Node) and isinstance(meta(leaf).get("val"), torch.Tensor)


def _is_parameter(node: fx.Node) -> bool:
    """Whether an input is read as a sharded parameter, through views alone."""
    users = list(node.users)
    while users:
        user = users.pop()
        if user.target is UNSHARD:
            return True
        if user.target in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            users += user.users
    return False
