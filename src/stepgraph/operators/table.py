"""What is known of an operator: one record each, family by family, whoever asks (:func:`of`).

What has no record gets what its schema and tags say, and else what is always right: it is no view, has a
kernel of its own, costs its bytes, and draws if torch says so.
"""

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.operators.updates import FUSED_ADAM, UPDATE
from stepgraph.program.collectives import ON_FIRST, SHARD_OF
from stepgraph.program.randomness import RANDOM
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

# How an operator takes part in a fused kernel.
CONSTANT = "constant"  # part of the loop that reads it: no traffic
LOOP = "loop"  # a loop over elements
ROWS = "rows"  # a reduction over the innermost dimension, and what follows over the same rows


@dataclass(frozen=True)
class Operator:
    """What is known of one operator.

    ``fusing``: CONSTANT, LOOP, ROWS, or None: a kernel of its own. ``reduces``: it is a reduction.
    ``elementwise``: an element of the result depends on the same element of the arguments alone.
    ``aliased``: positions of arguments that results may share storage with; None where no schema says.
    ``cost``: the class of its arithmetic in a device's table, empty where bytes decide.
    ``power``: that class depends on the exponent. ``looks_up``: it reads as much of its table as it
    returns. ``copies``: the value of its argument, in another place or type. ``draws``: a generator
    may decide its result. ``shape_argument``: position of the argument that is the result's shape.
    ``waits``: why the host waits for the device in it, which a CUDA graph cannot hold; empty: it does not.
    """

    target: Any
    fusing: str | None = None
    reduces: bool = False
    elementwise: bool = False
    aliased: tuple[int, ...] | None = None
    cost: str = ""
    power: bool = False
    looks_up: bool = False
    copies: bool = False
    draws: bool = False
    shape_argument: int | None = None
    waits: str = ""


READS_A_NUMBER = "the host reads a number of the device"
SIZED_BY_DATA = "how large its result is depends on data"
UNSAFE = "its kernel waits for the device, or computes on the host"

# Facts of a family of operators: (operators, what differs from what schema and tags say).
Facts = tuple[tuple[Any, ...], dict[str, Any]]


def overloads(*packets: Any) -> tuple[Any, ...]:
    """Every overload of operators."""
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads())


FACTS: tuple[Facts, ...] = (
    # Element by element: arithmetic, casts, copies, draws.
    (
        overloads(
            aten.exp, aten.log, aten.sigmoid, aten.silu, aten.softplus, aten.log1p, aten.expm1,
            aten.silu_backward,
        ),
        {"cost": "exp"},
    ),
    (overloads(aten.tanh, aten.erf), {"cost": "tanh"}),
    (overloads(aten.gelu), {"cost": "gelu"}),
    (overloads(aten.gelu_backward), {"cost": "gelu_backward"}),
    (overloads(aten.sin, aten.cos), {"cost": "trigonometric"}),
    (overloads(aten.sqrt, aten.rsqrt), {"cost": "root"}),
    (overloads(private.to_copy, aten.where, aten.lt), {"cost": "conversion"}),
    (overloads(aten.native_dropout_backward), {"cost": "masking"}),
    ((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar), {"power": True}),
    ((aten.clone.default, private.TO_COPY), {"elementwise": True, "copies": True}),
    ((private.TO_COPY, torch_internals.mutable_copy), {"fusing": LOOP}),
    ((aten.native_dropout.default, aten.native_dropout_backward.default), {"fusing": LOOP}),
    ((RANDOM,), {"fusing": LOOP, "cost": "random"}),
    ((UPDATE,), {"fusing": LOOP, "elementwise": True}),
    ((FUSED_ADAM,), {"cost": "root"}),
    # Tagged as random by torch; what they drop is said by their arguments.
    (
        (
            private.FLASH_ATTENTION_BACKWARD, private.EFFICIENT_ATTENTION_BACKWARD,
            private.CUDNN_ATTENTION_BACKWARD,
        ),
        {"draws": False},
    ),
    # Values made of numbers alone.
    (
        (
            aten.full.default, aten.full_like.default, aten.zeros.default, aten.ones.default,
            aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default,
            aten.new_full.default, aten.scalar_tensor.default, aten.new_ones.default,
            aten.arange.start_step, aten.arange.default, aten.arange.start,
            aten.empty.memory_format, aten.lift_fresh_copy.default,
        ),
        {"fusing": CONSTANT},
    ),
    (
        (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format),
        {"shape_argument": 0},
    ),
    (
        (aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default),
        {"shape_argument": 2},  # torch 2.11 does not say
    ),
    ((aten.zeros_like.default,), {"elementwise": True}),
    # What picks, places or joins parts of values.
    (
        (
            aten.embedding.default, aten.gather.default, aten.index_select.default,
            aten.index.Tensor,
        ),
        {"fusing": LOOP, "looks_up": True},
    ),
    (
        (
            aten.cat.default, aten.stack.default, aten.constant_pad_nd.default,
            aten.slice_backward.default, aten.select_backward.default, aten.slice_scatter.default,
            aten.select_scatter.default, SHARD_OF, ON_FIRST,
            aten.scatter.value,  # one number a row is a comparison, once it is placed
        ),
        {"fusing": LOOP},
    ),
    (overloads(aten.cat, aten.constant_pad_nd), {"cost": "concatenation"}),
    # Over the rows of a value: softmax, norms, sums, pooling.
    (
        (
            aten.native_layer_norm.default, private.SOFTMAX, private.LOG_SOFTMAX,
            private.SOFTMAX_BACKWARD, private.LOG_SOFTMAX_BACKWARD, private.FUSED_RMS_NORM,
        ),
        {"fusing": ROWS},
    ),
    (overloads(private.softmax), {"cost": "softmax"}),
    (overloads(private.safe_softmax), {"cost": "safe_softmax"}),
    (overloads(private.log_softmax), {"cost": "log_softmax"}),
    (
        overloads(private.softmax_backward, private.log_softmax_backward),
        {"cost": "softmax_backward"},
    ),
    (
        overloads(aten.sum, aten.mean, aten.amax, aten.var_mean, aten.linalg_vector_norm),
        {"cost": "reduction"},
    ),
    (
        overloads(
            aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
            aten.native_group_norm_backward, private.fused_rms_norm,
        ),
        {"cost": "layer_norm"},
    ),
    (
        overloads(
            aten.native_batch_norm, private.batch_norm, private.batch_norm_functional,
        ),
        {"cost": "batch_norm"},
    ),
    (overloads(aten.native_batch_norm_backward), {"cost": "batch_norm_backward"}),
    (
        overloads(
            aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward,
            private.adaptive_average_pool,
        ),
        {"cost": "pooling"},
    ),
    # Where the kernel of a device asks it something, by ATen's sources: whether a factorisation converged,
    # the range of a histogram, lengths. (Shapes that depend on data, and what reads a number, are tagged.)
    (
        overloads(
            aten.histc, aten.mode, aten.embedding_renorm, aten.cholesky, aten.linalg_eig,
            aten.linalg_eigvals, private.eigh, private.svd, private.eigvals,
            private.pack_padded_sequence, private.ctc_loss, private.cudnn_ctc_loss,
        ),
        {"waits": UNSAFE},
    ),
)  # fmt: skip

KNOWN: dict[Any, dict[str, Any]] = {}
for _targets, _facts in FACTS:
    for _target in _targets:
        KNOWN.setdefault(_target, {}).update(_facts)


_WAITS: dict[Any, str] = {
    torch.Tag.data_dependent_output: READS_A_NUMBER,
    torch.Tag.dynamic_output_shape: SIZED_BY_DATA,
}
if hasattr(torch.Tag, "cudagraph_unsafe"):  # torch 2.11 has no such tag
    _WAITS[torch.Tag.cudagraph_unsafe] = UNSAFE


def _derived(target: Any) -> dict[str, Any]:
    """What the schema and the tags of an operator say; of anything else, nothing."""
    tags = getattr(target, "tags", ())
    schema = getattr(target, "_schema", None)
    known: dict[str, Any] = {
        "reduces": torch.Tag.reduction in tags,
        "elementwise": torch.Tag.pointwise in tags,
        "draws": torch.Tag.nondeterministic_seeded in tags,
    }
    if torch.Tag.pointwise in tags:
        known["fusing"] = LOOP
    for tag, why in _WAITS.items():
        if tag in tags:
            known["waits"] = why
    if schema is not None:
        arguments = enumerate(schema.arguments)
        known["aliased"] = tuple(i for i, a in arguments if a.alias_info is not None)
    return known


def of(target: Any) -> Operator:
    """The record of an operator: what is declared over what its schema and tags say."""
    found = _RECORDS.get(id(target))
    if found is None or found[0] is not target:
        record = Operator(target, **(_derived(target) | KNOWN.get(target, {})))
        found = _RECORDS[id(target)] = target, record
    return found[1]


# By identity, beside the operator that it is the identity of: torch hashes its operators in Python, and
# this is asked millions of times.
_RECORDS: dict[int, tuple[Any, Operator]] = {}
