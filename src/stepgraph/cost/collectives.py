"""The time of collectives: an alpha-beta model per mesh dimension, ring or tree, inside or across nodes.

After Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005): a ring moves the least bytes in the most messages, a tree (or recursive doubling) the reverse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from stepgraph.cost.device import Device, Link
from stepgraph.cost.work import size_in_bytes
from stepgraph.program.collectives import KINDS, is_collective, mesh_dim_of
from stepgraph.program.layout import MeshShape
from stepgraph.program.metadata import meta

# Of a ring's bandwidth; what tuning tables of NCCL give its tree.
TREE_EFFICIENCY = 0.85

# Of a call, what a small merged collective pays at least: with it, what the solver counts for small Llamas
# on hosts, and for gpt2 on 8 and 128 accelerators, is within a fifth of what the merged step takes.
LEAST_PART = 0.3

# Bytes that a rank sends by a ring, as a multiple of (ranks - 1) / ranks of the tensor; rounds of a ring.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class Group:
    """How the ranks of one mesh dimension reach each other.

    ``ranks``: in the group; ``per_node``: of them in one node. ``latency``, ``bandwidth``: of one message
    inside a node, ``far_*``: between nodes, where a rank's own share of the node's network is meant.
    ``by_kind``: links inside a node that one kind of collective sees.
    """

    ranks: int
    per_node: int
    latency: float
    bandwidth: float
    far_latency: float
    far_bandwidth: float
    by_kind: Mapping[str, Link] = field(default_factory=dict)

    def of_kind(self, kind: str) -> Group:
        """The group as collectives of one kind see it."""
        if (link := self.by_kind.get(kind)) is None:
            return self
        return replace(self, latency=link.latency, bandwidth=link.bandwidth, by_kind={})

    @property
    def crosses(self) -> bool:
        """Whether the group spans several nodes."""
        return self.per_node < self.ranks

    @property
    def ring_bandwidth(self) -> float:
        """Bytes/s of a ring: what crosses nodes may use the network shares of all members in the node."""
        if not self.crosses:
            return self.bandwidth
        if self.per_node == 1:
            return self.far_bandwidth
        return min(self.bandwidth, self.per_node * self.far_bandwidth)


def links(mesh: MeshShape, device: Device) -> dict[str, Group]:
    """How each mesh dimension is wired; ranks are numbered row-major and fill one node after the other.

    Where groups of one dimension differ (a mesh that does not divide over the nodes), the worst counts.
    """
    near, far = device.intra, device.inter
    wires = near.latency, near.bandwidth, far.latency, far.bandwidth, device.collectives
    return {
        name: Group(size, min(size, _per_node(mesh, name, device.ranks_per_node)), *wires)
        for name, size in mesh.dims
    }


def _per_node(mesh: MeshShape, name: str, ranks_per_node: int) -> int:
    """The fewest members that a group of this dimension has in any node it touches."""
    axis = mesh.names.index(name)
    stride = math.prod(mesh.sizes[axis + 1 :])
    span = stride * mesh.sizes[axis]
    fewest = mesh.sizes[axis]
    # Groups repeat with the span; what differs is where in its node each one begins.
    period = math.lcm(span, ranks_per_node) // span
    blocks = min(mesh.world_size // span, period)
    for block in range(blocks):
        for offset in range(min(stride, ranks_per_node)):
            start = block * span + offset
            nodes = Counter((start + i * stride) // ranks_per_node for i in range(mesh.sizes[axis]))
            if len(nodes) > 1:
                fewest = min(fewest, *nodes.values())
    return fewest


def collective_seconds(kind: str, bytes: float, group: Group) -> float:
    """Time of one collective: the better of ring and tree.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        bytes: of the larger of the tensor before and after, on one rank; a number or an array of them.
        group: the mesh dimension's wiring.
    """
    if group.ranks == 1:
        return 0.0
    group = group.of_kind(kind)
    if kind == "all_to_all":
        return _all_to_all(bytes, group)
    return np.minimum(ring_seconds(kind, bytes, group), tree_seconds(kind, bytes, group))


def merged_seconds(kind: str, bytes: float, group: Group, device: Device) -> float:
    """Time of a collective that may run with others of its kind: of a parameter, or of its gradient.

    As :mod:`stepgraph.schedule.buckets` merges them, in flat ones of up to four times what is copied in
    the time of a call: each pays its part of the call, and is copied in and out. What is reduced over other
    ranks, or read too soon, is not merged, so no part is below :data:`LEAST_PART`.
    """
    alone = float(collective_seconds(kind, bytes, group))
    most = 4 * device.intra.latency * device.memory_bandwidth
    if bytes > most / 2:
        return alone
    call = float(collective_seconds(kind, 0, group))
    copied = 4 * bytes / device.memory_bandwidth
    return min(alone, alone - call * (1 - max(LEAST_PART, bytes / most)) + copied)


def ring_seconds(kind: str, bytes: float, group: Group) -> float:
    """Each rank passes parts to its neighbour, ``ranks - 1`` times a pass."""
    hops = group.ranks - 1
    far = group.ranks // group.per_node if group.crosses else 0
    latency = far * group.far_latency + max(hops - far, 0) * group.latency
    moved = bytes * hops / group.ranks / group.ring_bandwidth
    return _PASSES[kind] * (latency + moved)


def tree_seconds(kind: str, bytes: float, group: Group) -> float:
    """Partners at doubled distances, ``log2(ranks)`` times a pass; first those in the node."""
    rounds = math.ceil(math.log2(group.ranks))
    far = math.ceil(math.log2(group.ranks / group.per_node)) if group.crosses else 0
    latency = far * group.far_latency + (rounds - far) * group.latency
    moved = bytes / (group.ring_bandwidth * TREE_EFFICIENCY)
    return _PASSES[kind] * (latency + moved)


def _all_to_all(bytes: float, group: Group) -> float:
    """Each rank sends a part to each other one; what leaves the node takes its own network share."""
    part = bytes / group.ranks
    near = (group.per_node - 1) * part / group.bandwidth
    far = (group.ranks - group.per_node) * part / group.far_bandwidth
    latency = group.far_latency if group.crosses else group.latency
    return latency * math.ceil(math.log2(group.ranks)) + np.maximum(near, far)


def collective_of(node: fx.Node) -> tuple[str, int, str]:
    """(kind, bytes, mesh dimension) of a placed collective; bytes as :func:`collective_seconds` takes them.

    Raises:
        ValueError: the node is no collective.
    """
    if not is_collective(node):
        raise ValueError(f"{node} is no collective")
    return KINDS[node.target], moved_bytes(node), mesh_dim_of(node)


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the larger of a collective's tensors before and after, on one rank."""
    return max(size_in_bytes(meta(each)["val"]) for each in (node, node.args[0]))  # type: ignore[arg-type]
