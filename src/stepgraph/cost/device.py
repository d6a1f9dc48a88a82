"""What a device can do, as data: its rates, its memory, and the links between several."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

GIB = 2**30
NOT_MEASURED = "not measured: predictions for this device were never compared with a run"


@dataclass(frozen=True)
class Link:
    """How ranks reach each other.

    ``latency``: seconds of one message. ``bandwidth``: bytes/s that one rank sends (and receives at the
    same time), as collectives achieve it.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """One device and the links between several.

    Args:
        matmul: achievable FLOP/s of large dense matrix products, by type.
        peak: the publisher's dense peak, by type.
        memory_bandwidth: bytes/s, achievable, of data that lies in main memory.
        capacity: bytes.
        intra, inter: links inside a node and between nodes.
        ranks_per_node: devices that share ``intra``.
        kernel_seconds: floor of any kernel: its launch and its tail.
        half_flops: FLOPs at which a matrix product reaches half of its rate.
        half_bytes: bytes at which a memory-bound kernel reaches half of the bandwidth.
        overlaps: communication runs beside compute.
        source: where the numbers are from.
        error: what error predictions for it have shown.
        families: rate of other kinds of products (``attention``, ``convolution``, ...) over that of
            ``matmul``; 1 where a kind is missing, and as without where ``..._causal`` is.
        elements: seconds an element of operations that compute more than they move (``exp``, ``softmax``,
            ...), in float32; what is missing is bound by memory.
        caches: (bytes that a kernel touches, bytes/s), by size: nearer memories are faster.
        dispatch_seconds: host time of every operation that is called by itself, views included, where the
            host is what computes.
        collectives: links by kind of collective, where those differ from ``intra``.
        crowding: time of a kernel while all ranks of the node compute, over its time alone.
        beside: bytes of its memory that no tensor can have.
        beside_source: what they are, and where the number is from.
        host: to its host's memory and back; None: that memory is the device's own.
    """

    name: str
    matmul: Mapping[torch.dtype, float]
    peak: Mapping[torch.dtype, float]
    memory_bandwidth: float
    capacity: int
    intra: Link
    inter: Link
    ranks_per_node: int
    kernel_seconds: float
    half_flops: float
    half_bytes: float
    overlaps: bool = True
    source: str = ""
    error: str = NOT_MEASURED
    families: Mapping[str, float] = field(default_factory=dict)
    elements: Mapping[str, float] = field(default_factory=dict)
    caches: tuple[tuple[float, float], ...] = ()
    dispatch_seconds: float = 0.0
    collectives: Mapping[str, Link] = field(default_factory=dict)
    crowding: float = 1.0
    beside: int = 0
    beside_source: str = ""
    host: Link | None = None

    def rate(self, dtype: torch.dtype) -> float:
        """Achievable FLOP/s of matrix products of a type; an unknown type runs like float32."""
        return self.matmul.get(dtype, self.matmul[torch.float32])

    def bandwidth(self, bytes: Any) -> Any:
        """Bytes/s of a kernel that touches so many bytes; a number or an array."""
        if not self.caches:
            return np.full_like(np.asarray(bytes, float), self.memory_bandwidth)
        sizes, rates = zip(*self.caches, strict=True)
        logarithm = np.log(np.maximum(bytes, 1.0))
        return np.exp(np.interp(logarithm, np.log(sizes), np.log(rates)))

    def seconds(
        self,
        flops: Any,
        bytes: Any,
        dtype: torch.dtype,
        starts: Any = True,
        family: str = "matmul",
        vector: Any = 0.0,
    ) -> Any:
        """Time of one kernel: the roofline, with its efficiency at small sizes.

        A kernel of ``f`` FLOPs runs at ``rate * f / (f + half_flops)``, one of ``b`` bytes at
        ``bandwidth * b / (b + half_bytes)``; the slowest counts, and at least ``kernel_seconds``.
        No work is no kernel, and takes no time.

        Args:
            flops, bytes: numbers or numpy arrays that broadcast.
            dtype: of the operands.
            starts: False where the work is part of a kernel that is counted elsewhere: then neither
                floor nor ramp are charged again.
            family: of the product: a key of ``families``.
            vector: seconds of arithmetic that is no product.

        Returns:
            seconds; a float for numbers, else an array.
        """
        flops, bytes = np.asarray(flops, float), np.asarray(bytes, float)
        starts = np.asarray(starts, bool)
        without = self.families.get(family.replace("_causal", ""), 1.0)
        rate = self.rate(dtype) * self.families.get(family, without)
        compute = np.where(flops > 0, (flops + self.half_flops * starts) / rate, 0.0)
        moved = (bytes + self.half_bytes * starts) / self.bandwidth(bytes)
        time = np.maximum(np.maximum(compute, np.where(bytes > 0, moved, 0.0)), vector)
        time = np.where((time > 0) & starts, np.maximum(time, self.kernel_seconds), time)
        return float(time) if time.ndim == 0 else time
