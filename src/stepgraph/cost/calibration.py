"""The machine at hand as a Device: read from the file that ``stepgraph doctor --calibrate`` writes.

The file is untrusted input: JSON of a bounded size, every number checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stepgraph.cost.devices import GIB, Device, Link
from stepgraph.errors import UsageError

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

# A core of a server, two ranks of which talk over the loopback device.
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
    source="typical of one core; this machine was not measured",
    error="this machine was not measured, so it may be several times off: stepgraph doctor --calibrate",
)


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
    path = calibration_file()
    found = _read(path)
    if name not in found:
        return UNCALIBRATED if name == HOST else None
    return _Reader(path, name, found[name]).device()


def to_json(devices: Mapping[str, Device]) -> str:
    """The text of a calibration file."""
    return json.dumps(
        {"version": VERSION, "devices": {n: _dump(d) for n, d in devices.items()}}, indent=1
    )


def _dump(device: Device) -> dict[str, Any]:
    found = {key: value for key, value in vars(device).items() if key != "name"}
    for key in ("matmul", "peak"):
        found[key] = {str(k).removeprefix("torch."): v for k, v in found[key].items()}
    for key in ("intra", "inter"):
        found[key] = vars(found[key])
    found["collectives"] = {kind: vars(link) for kind, link in device.collectives.items()}
    return found


def _read(path: Path) -> dict[str, Any]:
    """The devices of a file, by name, not checked yet; none where there is no file."""
    if not path.is_file():
        if VARIABLE in os.environ and os.environ[VARIABLE] and path.exists():
            raise _unusable(path, "it is not a file")
        return {}
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise _unusable(path, f"it is larger than {_LARGEST_FILE // 2**10} KiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, f"it cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(data, dict) or not isinstance(data.get("devices"), dict):
        raise _unusable(path, "it has no 'devices'")
    if data.get("version") != VERSION:
        shown = str(data.get("version"))[:20]
        raise _unusable(path, f"it is of version {shown}; this stepgraph reads {VERSION}")
    return data["devices"]


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"the calibration {str(path)!r} cannot be used", why=why, do=_AGAIN)


class _Reader:
    """One device of a file, field by field."""

    def __init__(self, path: Path, name: str, data: Any) -> None:
        self.path, self.name = path, name
        if not isinstance(data, dict):
            raise _unusable(path, f"{name} is no object")
        self.data = data

    def device(self) -> Device:
        """The device, every field checked."""
        return Device(
            name=self.name,
            matmul=self._rates("matmul"),
            peak=self._rates("peak"),
            memory_bandwidth=self._number("memory_bandwidth"),
            capacity=int(self._number("capacity")),
            intra=self._link("intra"),
            inter=self._link("inter"),
            ranks_per_node=int(self._number("ranks_per_node", least=1)),
            kernel_seconds=self._number("kernel_seconds", least=0),
            half_flops=self._number("half_flops", least=0),
            half_bytes=self._number("half_bytes", least=0),
            overlaps=self._kind("overlaps", bool),
            source=self._kind("source", str)[:1000],
            error=self._kind("error", str)[:1000],
            families=self._numbers("families"),
            elements=self._numbers("elements"),
            caches=self._caches(),
            dispatch_seconds=self._number("dispatch_seconds", least=0),
            collectives=self._links("collectives"),
            crowding=self._number("crowding"),
        )

    def _kind(self, key: str, kind: type, within: dict | None = None) -> Any:
        value = (self.data if within is None else within).get(key)
        if not isinstance(value, kind):
            raise _unusable(self.path, f"{self.name}: {key!r} is not of kind {kind.__name__}")
        return value

    def _number(
        self, key: str, least: float | None = None, within: dict | None = None, at: str = ""
    ) -> float:
        value = (self.data if within is None else within).get(key)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        enough = good and math.isfinite(value) and abs(value) < 1e30
        if not enough or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"of at least {least:g}"
            raise _unusable(self.path, f"{self.name}: {at + key!r} is not a number {bound}")
        return float(value)

    def _rates(self, key: str) -> dict[torch.dtype, float]:
        given = self._kind(key, dict)
        unknown = set(given) - set(_DTYPES)
        if unknown or "float32" not in given:
            problem = f"does not know {sorted(unknown)[0][:40]!r}" if unknown else "lacks 'float32'"
            raise _unusable(self.path, f"{self.name}: {key!r} {problem}")
        return {_DTYPES[name]: self._number(name, within=given, at=f"{key}.") for name in given}

    def _numbers(self, key: str) -> dict[str, float]:
        given = self._kind(key, dict)
        return {name: self._number(name, within=given, at=f"{key}.") for name in given}

    def _caches(self) -> tuple[tuple[float, float], ...]:
        """(bytes, bytes/s) rows, sizes ascending."""
        rows = []
        for row in self._kind("caches", list):
            if not isinstance(row, list) or len(row) != 2:
                raise _unusable(self.path, f"{self.name}: 'caches' is no list of (bytes, bytes/s)")
            pair = {"bytes": row[0], "rate": row[1]}
            size, rate = (self._number(name, within=pair, at="caches.") for name in pair)
            rows.append((size, rate))
        if rows != sorted(rows, key=lambda row: row[0]):
            raise _unusable(self.path, f"{self.name}: the sizes of 'caches' do not ascend")
        return tuple(rows)

    def _links(self, key: str) -> dict[str, Link]:
        given = self._kind(key, dict)
        return {kind: self._link(kind, given) for kind in given}

    def _link(self, key: str, within: dict | None = None) -> Link:
        given = self._kind(key, dict, within)
        latency = self._number("latency", least=0, within=given, at=f"{key}.")
        return Link(latency, self._number("bandwidth", within=given, at=f"{key}."))
