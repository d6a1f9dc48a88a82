"""What a Program is to run on, as far as the schedule and lowering ask."""

from dataclasses import dataclass

import torch

from stepgraph.cost.calibration import HOST, UNCALIBRATED
from stepgraph.cost.devices import DEVICES, Device

ACCELERATOR = "cuda"  # torch's name of every device of the table, AMD's too
STREAMS = 2  # of an accelerator: compute, and communication beside it


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        device_type: torch's name of it.
        streams: how many queues of work run beside each other.
        overlaps: several collectives may be in flight at once. Where they run on threads of the host,
            several in flight corrupt the heap (torch 2.13; ``benchmarks/collectives_in_flight.py`` shows it
            without stepgraph).
        call_bytes: what could be copied in the time that a collective of no bytes takes.
        graphs: what is launched can be captured, and launched again as one.
    """

    device_type: str
    streams: int
    overlaps: bool
    call_bytes: int
    graphs: bool = False


def target_of(device: Device) -> Target:
    """The target that a device of the cost model is.

    Ranks that replay a plan, or start from a preset, must all come to the same: of a device that was
    measured, what is usual of its kind counts.
    """
    if device.name not in DEVICES:
        return usual_target(device.name)
    return _target(device, ACCELERATOR)


def usual_target(device_type: str) -> Target:
    """The target of a kind of device whose costs nobody asked for."""
    if device_type == HOST:
        return _target(UNCALIBRATED, HOST)
    name = torch.get_device_module(device_type).get_device_name().lower()
    row = next((row for row in DEVICES.values() if row.name in name), DEVICES["h100"])
    return _target(row, device_type)


def _target(row: Device, device_type: str) -> Target:
    streams = STREAMS if row.overlaps else 1
    call_bytes = int(row.intra.latency * row.memory_bandwidth)
    return Target(device_type, streams, row.overlaps, call_bytes, device_type != HOST)
