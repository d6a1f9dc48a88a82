"""The table of accelerators, and the machine at hand from its calibration.

Rates are those that large, well-shaped work achieves, not the publishers' peaks: those are kept beside
them, for the model FLOPs utilisation. Every row says where its numbers are from.
"""

from typing import Any

import torch

from stepgraph.cost.calibration import machine, machine_names
from stepgraph.cost.device import GIB, Device, Link
from stepgraph.errors import UsageError, near_misses

# Pinned memory over PCIe with 16 lanes, one way: NVIDIA's bandwidthTest gives about 25e9 of 32e9 bytes/s
# for generation 4, about 55e9 of 64e9 for generation 5. The latency is assumed: a launch and its event.
PCIE_4, PCIE_5 = Link(10e-6, 25e9), Link(10e-6, 55e9)
FRAGMENTED = 0.03
BESIDE_SOURCE = (
    "assumed, not measured: 1 GiB of context, kernels and cuBLAS workspaces, 1 GiB of NCCL buffers, 3 % of "
    "the capacity lost between the allocator's blocks"
)


def _accelerator(
    name: str, achieved: float, peaks: tuple[float, float, float], **rest: Any
) -> Device:
    """A row of the table.

    Args:
        achieved: part of the peak that large matrix products reach.
        peaks: dense FLOP/s of (float16 and bfloat16, float32, float64).
    """
    half, single, double = peaks
    peak = {
        torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double
    }  # fmt: skip
    rates = {k: v * achieved for k, v in peak.items()}
    # Of fused attention kernels and of implicit products; FlashAttention-2 and -3 give such figures.
    families = {"attention": 0.8, "attention_backward": 0.65, "convolution": 0.7}
    beside = 2 * GIB + int(FRAGMENTED * rest["capacity"])
    told = {"beside": beside, "beside_source": BESIDE_SOURCE}
    return Device(name, rates, peak, ranks_per_node=8, families=families, **told, **rest)


# float32 is true float32: torch uses TF32 only where it is told to.
DEVICES: dict[str, Device] = {
    "a100": _accelerator(
        "a100",
        0.82,
        (312e12, 19.5e12, 19.5e12),
        memory_bandwidth=1.75e12,  # of 2.039e12
        capacity=80 * GIB,
        intra=Link(6e-6, 235e9),  # of 300e9 each way
        inter=Link(14e-6, 22e9),  # of 25e9
        host=PCIE_4,
        kernel_seconds=3.5e-6,
        half_flops=1.5e9,
        half_bytes=5e6,
        source="NVIDIA A100 80GB SXM data sheet (312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s); achieved: "
        "about 255 TFLOP/s in cuBLAS, 86 % of the bandwidth, nccl-tests bus bandwidth on HGX with 200 Gb/s "
        "a GPU",
    ),
    "h100": _accelerator(
        "h100",
        0.68,
        (989e12, 67e12, 67e12),
        memory_bandwidth=2.9e12,  # of 3.35e12
        capacity=80 * GIB,
        intra=Link(6e-6, 360e9),  # of 450e9 each way
        inter=Link(14e-6, 45e9),  # of 50e9
        host=PCIE_5,
        kernel_seconds=3e-6,
        half_flops=4e9,
        half_bytes=8e6,
        source="NVIDIA H100 SXM5 data sheet (989 TFLOP/s bf16 dense, 3.35 TB/s, NVLink 900 GB/s); "
        "achieved: about 670 TFLOP/s in cuBLAS at 700 W, 87 % of the bandwidth, nccl-tests bus bandwidth "
        "on HGX with 400 Gb/s a GPU",
    ),
    "h200": _accelerator(
        "h200",
        0.68,
        (989e12, 67e12, 67e12),
        memory_bandwidth=4.2e12,  # of 4.8e12
        capacity=141 * 10**9,
        intra=Link(6e-6, 360e9),
        inter=Link(14e-6, 45e9),
        host=PCIE_5,
        kernel_seconds=3e-6,
        half_flops=4e9,
        half_bytes=11e6,
        source="NVIDIA H200 SXM data sheet (989 TFLOP/s bf16 dense, 141 GB at 4.8 TB/s, NVLink 900 GB/s); "
        "achieved as for the H100, whose chip it has",
    ),
    "b200": _accelerator(
        "b200",
        0.70,
        (2250e12, 75e12, 37e12),
        memory_bandwidth=6.8e12,  # of 7.7e12
        capacity=180 * 10**9,
        intra=Link(6e-6, 700e9),  # of 900e9 each way
        inter=Link(14e-6, 45e9),  # of 50e9
        host=PCIE_5,
        kernel_seconds=3e-6,
        half_flops=9e9,
        half_bytes=18e6,
        source="NVIDIA HGX B200 data sheet (4.5 PFLOP/s bf16 sparse, so 2.25 dense; 180 GB at 7.7 TB/s, "
        "NVLink 1.8 TB/s, 400 Gb/s a GPU); achieved: 70 % of peak, 88 % of the bandwidth, by analogy with "
        "the H100",
    ),
    "mi300x": _accelerator(
        "mi300x",
        0.47,
        (1307e12, 163.4e12, 163.4e12),
        memory_bandwidth=4.2e12,  # of 5.3e12
        capacity=192 * GIB,
        intra=Link(9e-6, 300e9),  # of 448e9 each way, over seven links
        inter=Link(18e-6, 42e9),  # of 50e9
        host=PCIE_5,
        kernel_seconds=5e-6,
        half_flops=8e9,
        half_bytes=20e6,
        source="AMD Instinct MI300X data sheet (1,307 TFLOP/s bf16 dense, 192 GB at 5.3 TB/s, Infinity "
        "Fabric 896 GB/s); achieved: 45 to 48 % of peak, 81 % of the bandwidth in published measurements "
        "(arXiv 2510.27583; SemiAnalysis, December 2024), rccl-tests bus bandwidth",
    ),
}


def find_device(name: str) -> Device:
    """A device of the table, or the machine at hand under the name that torch has for it.

    Raises:
        UsageError: an unknown name, with near misses; a calibration file that cannot be used.
    """
    if name in DEVICES:
        return DEVICES[name]
    found = machine(name)
    if found is None:
        known = [*DEVICES, *machine_names()]
        raise UsageError(f"unknown device {name!r}", do=near_misses(name, known))
    return found


def device_at_hand(kind: str) -> Device:
    """What this process computes on: as it was measured, else the row of the table that its name says.

    Args:
        kind: torch's name of the kind of device.

    Raises:
        UsageError: it was not measured, and is not in the table.
    """
    found = machine(kind)
    if found is not None:
        return found
    name = torch.get_device_module(kind).get_device_name().lower()
    for row in DEVICES.values():
        if row.name in name:
            return row
    raise UsageError(
        f"there are no costs for this device, {name!r}",
        do="measure it: stepgraph doctor --calibrate; or give a plan made for a device of the table",
    )
