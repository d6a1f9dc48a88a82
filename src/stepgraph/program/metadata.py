"""What a node of a Program carries: every key of its metadata, and the one way to read and write them."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from torch import fx

from stepgraph.program.layout import Placements


class Metadata(TypedDict):
    """Keys that a node may have; every operation has the first four, inputs a value and a name.

    Attributes:
        val: FakeTensor (or a tuple of them): shape, strides, dtype. Local to a rank once bound.
        phase: ``forward``, ``backward`` or ``optimizer``.
        module: path of the module that ran the operation, in the model's own names ("" outside).
        name: the stable name: ``layers.3.self_attn.q_proj/mm``.
        source: the source line, where capture knew it.
        placements: one for each result, None for what is no tensor; placed programs only.
        checkpoint: the number of its region, under ``torch.utils.checkpoint``.
        sequence: autograd's number of the operation, the same in its backward; as captured.
        region_policy: what the region's own policy says of it: ``must_save``, ``prefer_recompute``, ...
        recomputed_from: the stable name of the forward operation that it repeats.
        casts_parameter: it gives a parameter the type that the model computes in.
        accumulates: it adds a micro-batch's gradient to those of the earlier ones.
        accumulated_next: it casts a gradient before it is accumulated.
        reduced_before: it casts a gradient that is reduced already.
        padding_is_zero: what pads an uneven shard adds nothing to its result.
        rows_piece: of what is computed some rows at a time, the number of the piece that it is part of.
        adds_pieces: it adds what such a piece gives to the sum over those before.
        stands_for: the collective in whose place a check runs it.
        traffic: which arguments come from memory, and whether the result goes there. This and the
            following are set by :mod:`stepgraph.cost.traffic`, where costs are asked for.
        starts: it starts a kernel.
        dispatched: the host calls it by itself.
        kernel: the number of the fused kernel that it is part of.
        piece: the number of the piece that it is compiled in. This and the following are set by
            :mod:`stepgraph.lowering.costed`.
        anew_in: the pieces that compute it themselves.
    """

    val: Any
    phase: str
    module: str
    name: str
    source: NotRequired[str]
    placements: tuple[Placements | None, ...]
    checkpoint: NotRequired[int]
    sequence: NotRequired[int]
    region_policy: NotRequired[str]
    recomputed_from: NotRequired[str]
    casts_parameter: NotRequired[bool]
    accumulates: NotRequired[bool]
    accumulated_next: NotRequired[bool]
    reduced_before: NotRequired[bool]
    padding_is_zero: NotRequired[bool]
    rows_piece: NotRequired[int]
    adds_pieces: NotRequired[bool]
    stands_for: NotRequired[Any]
    traffic: tuple[tuple[bool, ...], bool]
    starts: bool
    dispatched: bool
    kernel: NotRequired[int]
    piece: NotRequired[int]
    anew_in: NotRequired[tuple[int, ...]]


def meta(node: fx.Node) -> Metadata:
    """The node's metadata, to read and to write."""
    return node.meta  # type: ignore[return-value]  # read a million times: no call of typing.cast


def set_meta(node: fx.Node, metadata: Mapping[str, Any]) -> None:
    """Gives a node metadata of its own."""
    # Past fx, which takes a node out of its graph's table for that, and puts it back in. Not into what is
    # there: torch's partitioner gives several nodes one dictionary.
    object.__setattr__(node, "meta", dict(metadata))
