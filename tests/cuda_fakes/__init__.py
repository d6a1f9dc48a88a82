"""A CUDA device that is not there, on which torch traces a backward, in a process of its own.

A torch that is built for the host alone aborts where a fake CUDA tensor requires a gradient. A small
library that is loaded before torch says otherwise; nothing runs on the device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def lacking() -> str:
    """Why the library cannot be made here, or nothing."""
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for CUDA, and has a device of its own"
    return ""


def build(folder: Path) -> Path:
    """Compiles the library."""
    torch, made = torch_folder(), folder / "libdevice.so"
    libraries = torch / "lib"
    subprocess.run(
        [
            "g++", "-O0", "-std=c++20", "-shared", "-fPIC", "-DCPU_CAPABILITY=DEFAULT",
            f"-I{torch / 'include'}", str(SOURCE), "-o", str(made), f"-L{libraries}",
            "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{libraries}",
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return made


def run(module: str, library: Path, *arguments: str) -> list[dict]:
    """What a module of this package prints: an object a line."""
    command = [sys.executable, "-m", f"{__name__}.{module}", str(library), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def pretend(library: str) -> None:
    """In this process, whose torch is not imported yet: one CUDA device of the newest kind but one."""
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch

    instead = {
        "device_count": lambda: 1,
        "get_device_name": lambda *a: "H100",
        "get_device_capability": lambda *a: (9, 0),
        "current_device": lambda: 0,
        "set_device": lambda *a: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *a: True,
    }
    for name, function in instead.items():
        setattr(torch.cuda, name, function)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # or it casts nothing
