"""The machine at hand as a Device: read from the file that ``stepgraph doctor --calibrate`` writes.

The file is untrusted input: JSON of a bounded size, checked by msgspec against the types below.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from stepgraph.cost.device import GIB, Device, Link
from stepgraph.errors import UsageError
from stepgraph.planning.reading import MalformedError, Strict, Text, convert, parse_json, read_bytes

VARIABLE = "STEPGRAPH_CALIBRATION"
VERSION = 2
HOST = torch.Generator().device.type  # what torch computes on where there is no accelerator
_LARGEST_FILE = 2**20
_AGAIN = "measure this machine again: stepgraph doctor --calibrate"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
_TYPICAL = {torch.float32: 4e10, torch.float64: 2e10, torch.bfloat16: 2e10, torch.float16: 1e10}

# A core of a server, two ranks of which talk over the loopback device. There a small collective of any kind
# takes about as long (an all-reduce is two passes, each with half the latency), and what is reduced is sent
# whole, whoever gets which part.
UNCALIBRATED = Device(
    name=HOST,
    matmul=_TYPICAL,
    peak=_TYPICAL,
    memory_bandwidth=8e9,
    capacity=8 * GIB,
    intra=Link(2e-4, 1.5e9),
    inter=Link(5e-4, 1e9),
    ranks_per_node=64,
    kernel_seconds=5e-6,
    half_flops=2e5,
    half_bytes=6e4,
    overlaps=False,
    collectives={"all_reduce": Link(1e-4, 1.5e9), "reduce_scatter": Link(2e-4, 7.5e8)},
    source="typical of one core; this machine was not measured",
    error="this machine was not measured, so it may be several times off: stepgraph doctor --calibrate",
)


_AboveZero = Annotated[float, Meta(gt=0, lt=1e30)]
_FromZero = Annotated[float, Meta(ge=0, lt=1e30)]
_FromOne = Annotated[float, Meta(ge=1, lt=1e30)]
_Rates = dict[Literal["float32", "float64", "bfloat16", "float16"], _AboveZero]


class _Link(Strict, frozen=True):
    latency: _FromZero
    bandwidth: _AboveZero

    def link(self) -> Link:
        return Link(self.latency, self.bandwidth)


class _Device(Strict, frozen=True):
    """One device of a file."""

    matmul: _Rates
    peak: _Rates
    memory_bandwidth: _AboveZero
    capacity: _AboveZero
    intra: _Link
    inter: _Link
    ranks_per_node: _FromOne
    kernel_seconds: _FromZero
    half_flops: _FromZero
    half_bytes: _FromZero
    overlaps: bool
    source: Text
    error: Text
    families: dict[str, _AboveZero]
    elements: dict[str, _AboveZero]
    caches: list[tuple[_AboveZero, _AboveZero]]
    dispatch_seconds: _FromZero
    collectives: dict[str, _Link]
    crowding: _AboveZero
    host: _Link | None = None

    def __post_init__(self) -> None:
        for name, rates in (("matmul", self.matmul), ("peak", self.peak)):
            if "float32" not in rates:
                raise ValueError(f"{name!r} lacks 'float32'")
        if self.caches != sorted(self.caches, key=lambda row: row[0]):
            raise ValueError("the sizes of 'caches' do not ascend")

    def device(self, name: str) -> Device:
        """What costs are computed from."""
        given = msgspec.structs.asdict(self) | {
            "matmul": {_DTYPES[kind]: rate for kind, rate in self.matmul.items()},
            "peak": {_DTYPES[kind]: rate for kind, rate in self.peak.items()},
            "capacity": int(self.capacity),
            "intra": self.intra.link(),
            "inter": self.inter.link(),
            "ranks_per_node": int(self.ranks_per_node),
            "caches": tuple(self.caches),
            "host": None if self.host is None else self.host.link(),
            "collectives": {kind: row.link() for kind, row in self.collectives.items()},
        }
        return Device(name, **given)


class _File(Strict, frozen=True):
    version: int
    devices: dict[Text, _Device]


def calibration_file() -> Path:
    """Where the calibration lies: ``$STEPGRAPH_CALIBRATION``, else in the user's cache."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "stepgraph" / "machine.json"


def machine_names() -> list[str]:
    """Names of what was measured here; the host's at least."""
    return list(dict.fromkeys([HOST, *_read(calibration_file())]))


def machine(name: str) -> Device | None:
    """A device that was measured on this machine; the host with rough numbers if it was not.

    Args:
        name: torch's name of the kind of device.

    Raises:
        UsageError: the calibration file cannot be used; the message says what is wrong with it.
    """
    return _read(calibration_file()).get(name, UNCALIBRATED if name == HOST else None)


def to_json(devices: Mapping[str, Device]) -> str:
    """The text of a calibration file."""
    return json.dumps(
        {"version": VERSION, "devices": {n: _dump(d) for n, d in devices.items()}}, indent=1
    )


def _dump(device: Device) -> dict[str, Any]:
    found = dataclasses.asdict(device)
    for key in ("name", "beside", "beside_source"):  # which nobody measures
        del found[key]
    for key in ("matmul", "peak"):
        found[key] = {str(k).removeprefix("torch."): v for k, v in found[key].items()}
    return found


def _read(path: Path) -> dict[str, Device]:
    """The devices of a file, by name; none where there is no file."""
    if not path.is_file():
        if VARIABLE in os.environ and os.environ[VARIABLE] and path.exists():
            raise _unusable(path, "it is not a file")
        return {}
    try:
        data = parse_json(read_bytes(path, _LARGEST_FILE))
        version = data.get("version") if isinstance(data, dict) else VERSION
        if version != VERSION:
            shown = str(version)[:20]
            raise _unusable(path, f"it is of version {shown}; this stepgraph reads {VERSION}")
        found = convert(data, _File).devices
    except MalformedError as error:
        raise _unusable(path, error.problem, error.where) from error
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error}") from error
    return {name: row.device(name) for name, row in found.items()}


def _unusable(path: Path, why: str, where: str | None = None) -> UsageError:
    what = f"the calibration {str(path)!r} cannot be used"
    return UsageError(what, where=where, why=why, do=_AGAIN)
