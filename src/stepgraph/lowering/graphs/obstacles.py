"""What keeps a Program from being captured as one CUDA graph: read off its operations, without a GPU.

A graph holds kernels and their arguments as they were at capture. So the host may not wait for the device,
nothing may be copied from or to memory that moves, and whatever changes from step to step is read from a
tensor of the device at the same address. Operators say what they do in :mod:`stepgraph.operators.table`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.errors import CaptureError
from stepgraph.lowering.attention import KEYED
from stepgraph.lowering.record import Obstacle
from stepgraph.operators import table as operators
from stepgraph.operators.draws import is_random
from stepgraph.operators.table import READS_A_NUMBER, SIZED_BY_DATA, UNSAFE
from stepgraph.planning.target import Target
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import WAITS, is_copy
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments, tensors_of
from stepgraph.program.randomness import RANDOM

aten = torch.ops.aten

# What is wrong -> what to do about it.
NO_GRAPHS = "what a device of type {!r} runs is not captured: that takes a CUDA device"
NOT_FIXED = "its shape is not fixed, and a graph holds one"
NO_TENSOR = "it is no tensor: the graph would hold the number that it was at capture"
FROZEN = "it reads a number of the host, which the graph would hold as it was at capture"
ON_HOST = "it reads a tensor of the host"
COPIES = "it copies between host and device, which a capture refuses from memory that may move"
COMPUTED_ON_HOST = "the host computes it, once at capture and not when the graph runs again"
COUNTED = "a boolean mask as an index becomes positions, which the host counts"
DRAWS = "it draws from a generator that no counter of the step advances"
APART = "its collective starts in one part of the step and is awaited in another"
DO = {
    NOT_FIXED: "bring batches of a few fixed shapes (stepgraph.pad_batches)",
    NO_TENSOR: "pass it as a tensor (torch.as_tensor)",
    FROZEN: "make it a tensor of the device: a buffer that is changed in place, or a part of the batch",
    ON_HOST: "keep it on the device: register it as a buffer, or pass it in the batch",
    COPIES: "keep it on the device, or move it in the batch, before the step",
    COMPUTED_ON_HOST: "make it on the device (device=x.device)",
    COUNTED: "write torch.where(mask, values, x) in place of x[mask] = values",
    DRAWS: "draw with torch.rand, randn, bernoulli or dropout, without a generator of its own",
    APART: "remove the obstacle between them",
    READS_A_NUMBER: "keep it a tensor: torch.where in place of a branch, a mask in place of a size",
    SIZED_BY_DATA: "give it a fixed size: torch.where(mask, x, 0) in place of x[mask], output_size=... "
    "for repeat_interleave",
    UNSAFE: "compute it outside the step, or with another operator",
}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def find_obstacles(program: Program, target: Target) -> list[Obstacle]:
    """Everything that keeps a Program from being one graph, in order; nothing: it can be captured.

    Args:
        program: of one rank, for the target.
    """
    if not target.graphs:
        return [no_graphs(target)]
    within = obstacles_within(program, target).values()
    # What depends on a shape that is not fixed is told where that begins.
    return [*_of_inputs(program), *(one for one in within if one.why != NOT_FIXED)]


def no_graphs(target: Target) -> Obstacle:
    """That a kind of device has no graphs at all."""
    do = "lowering='inductor' is the next best"
    return Obstacle("", "", "", NO_GRAPHS.format(target.device_type), do)


def obstacles_within(program: Program, target: Target) -> dict[fx.Node, Obstacle]:
    """The operations that cannot be captured, each with the reason."""
    found: dict[fx.Node, Obstacle] = {}
    on_host = _for_keyed_draws(program)
    sized = {node for node in program.graph.nodes if is_sized_by_data(meta(node).get("val"))}
    for node in program.operations():
        if node in on_host:
            continue
        if why := _why_not(node, target, sized):
            found[node] = obstacle(node, why)
    found |= {node: obstacle(node, APART) for node in _awaited_elsewhere(program)}
    return {node: found[node] for node in program.graph.nodes if node in found}


def obstacle(node: fx.Node, why: str) -> Obstacle:
    """What is wrong with a node, where it comes from, and what to do."""
    about = meta(node)
    return Obstacle(
        about.get("name", node.name), about.get("module", ""), about.get("source", ""), why, DO[why]
    )


def of_error(error: CaptureError) -> Obstacle:
    """What keeps a step from being captured as one program keeps it from being one graph."""
    why = error.what if error.why is None else f"{error.what}: {error.why}"
    return Obstacle("", "", error.where or "", why, error.do or "see the error's page")


def is_sized_by_data(value: Any) -> bool:
    """Whether the shape of a value, or the value itself, is known only once data are."""
    if isinstance(value, _SYMBOLS):
        return True
    return any(isinstance(s, torch.SymInt) for t in tensors_of(value) for s in t.shape)


# -- one operation


def _why_not(node: fx.Node, target: Target, sized: set[fx.Node]) -> str:
    if node.target is KEYED:  # its draws are registered with the graph
        return ""
    if why := _waits(node):
        return why
    if is_random(node) and node.target is not RANDOM:
        return DRAWS
    if why := _elsewhere(node, target):
        return why
    return "" if sized.isdisjoint((node, *node.all_input_nodes)) else NOT_FIXED


def _waits(node: fx.Node) -> str:
    """Whether the host waits for the device in it, and why."""
    if node.target in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        indices: Any = node.args[1]
        masks = any(_is_mask(index) for index in indices if isinstance(index, fx.Node))
        if not masks:
            return ""
        return SIZED_BY_DATA if node.target is aten.index.Tensor else COUNTED
    told = node.target is aten.repeat_interleave.Tensor and isinstance(
        node.kwargs.get("output_size", node.args[1] if len(node.args) > 1 else None), int
    )
    return "" if told else operators.of(node.target).waits


def _is_mask(index: fx.Node) -> bool:
    return meta(index)["val"].dtype in (torch.bool, torch.uint8)


def _elsewhere(node: fx.Node, target: Target) -> str:
    """What is wrong with where arguments and results are."""

    def is_there(tensor: torch.Tensor) -> bool:
        return tensor.device.type == target.device_type

    results = tensors_of(meta(node).get("val"))
    read = tensor_arguments(node)
    given = [(arg, tensor) for arg in read for tensor in tensors_of(meta(arg).get("val"))]
    if all(map(is_there, results)) and all(is_there(tensor) for _, tensor in given):
        return ""
    if is_copy(node) or node.target in WAITS:  # from and to pinned memory, which stays
        return ""
    known = operators.of(node.target)
    if known.copies or node.target is torch_internals.mutable_copy:
        places = {tensor.device.type for _, tensor in given} | {t.device.type for t in results}
        if len(places) > 1:
            return COPIES
    if not any(map(is_there, results)):
        return COMPUTED_ON_HOST
    held = [(arg, tensor) for arg, tensor in given if not is_there(tensor)]
    if any(tensor.dim() for _, tensor in held):
        return ON_HOST
    return FROZEN if any(arg.op != "get_attr" for arg, _ in held) else ""  # that is a constant


def _for_keyed_draws(program: Program) -> set[fx.Node]:
    """What the host computes of the step's seed, for kernels that draw: it is set before each replay."""
    fine: set[fx.Node] = set()
    seeds = {node for role, node, _ in program.input_rows if isinstance(role, roles.HostSeed)}
    for node in reversed(program.graph.nodes):
        read = node.all_input_nodes
        derived = node.target is aten.add.Tensor and bool(read)
        used = bool(node.users) and all(u in fine or u.target is KEYED for u in node.users)
        if (node in seeds or derived) and used and not _is_large(node):
            fine.add(node)
    return {node for node in fine if node in seeds or not fine.isdisjoint(node.all_input_nodes)}


def _is_large(node: fx.Node) -> bool:
    return any(tensor.dim() for tensor in tensors_of(meta(node).get("val")))


# -- the whole


def _of_inputs(program: Program) -> Iterator[Obstacle]:
    for node in program.placeholders:
        value = meta(node).get("val")
        if is_sized_by_data(value) and isinstance(value, torch.Tensor):
            yield obstacle(node, NOT_FIXED)
        elif not isinstance(value, torch.Tensor) and node.users:
            yield obstacle(node, NO_TENSOR)


def _awaited_elsewhere(program: Program) -> Iterator[fx.Node]:
    """Collectives that are not awaited here, and waits for such as were not started here."""
    for node in program.operations():
        if is_collective(node) and not any(u.target is torch_internals.WAIT for u in node.users):
            yield node
        elif node.target is torch_internals.WAIT:
            source = node.args[0]
            while isinstance(source, fx.Node) and source.op == "call_function":
                if is_collective(source):
                    break
                source = source.args[0] if source.args else None
            else:
                yield node
