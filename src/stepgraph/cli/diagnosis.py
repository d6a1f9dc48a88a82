"""Looks at this machine: versions, devices, and what works, by trying it.

Nothing is changed.
"""

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator

import torch

from stepgraph.cli import launcher
from stepgraph.cli.trials import FAILED, NOT_HERE, OK, SECONDS, TRIALS, Check, try_out
from stepgraph.runtime.ranks import communication_first
from stepgraph.torch_internals import inductor

TESTED_TORCH = ("2.11", "2.13")
_PYTHON = (3, 11)


def diagnose(
    progress: Callable[[str], None] = lambda name: None, seconds: float = SECONDS
) -> list[Check]:
    """Every check, in order; a trial in a process of its own counts as failed after so many seconds."""
    found = []
    for name, check in _CHECKS.items():
        progress(name)
        found += check(name)
    for name in TRIALS:
        progress(name)
        found.append(try_out(name, seconds))
    return found


# -- what is installed, and on what


def _version(name: str) -> Iterator[Check]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        needed = name == "stepgraph"
        do = f"pip install {name}" + ("" if needed else ", for models from their configs")
        yield Check(name, NOT_HERE, "not installed", do)
        return
    yield Check(name, OK, version)


def _python(name: str) -> Iterator[Check]:
    enough = sys.version_info >= _PYTHON
    wanted = ".".join(map(str, _PYTHON))
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    do = "" if enough else f"use Python {wanted} or newer"
    yield Check(name, OK if enough else FAILED, found, do, needed=True)


def torch_check(version: str) -> Check:
    """Whether a version of torch is one that stepgraph was tested on."""
    oldest, newest = (_numbers(bound) for bound in TESTED_TORCH)
    tested = f"stepgraph is tested on {TESTED_TORCH[0]} to {TESTED_TORCH[1]}"
    if _numbers(version) < oldest:
        do = f"install torch {TESTED_TORCH[1]}"
        return Check("torch", FAILED, f"{version}; {tested}", do, needed=True)
    if _numbers(version) > newest:
        do = f"if something fails, try torch {TESTED_TORCH[1]}"
        return Check("torch", OK, f"{version}; {tested}", do, needed=True)
    return Check("torch", OK, version, needed=True)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _host(name: str) -> Iterator[Check]:
    cores = launcher.threads_per_rank(1)
    yield Check(
        name, OK, f"{cores} cores, {launcher.host_memory_bytes() / 2**30:.1f} GiB of memory"
    )


def _accelerators(name: str) -> Iterator[Check]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        versions = f"CUDA {torch.version.cuda}, driver for CUDA {inductor.cuda_driver_version()}"
        yield Check(f"GPU {index}", OK, f"{device.name}, {memory}, {versions}")
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        why, do = "this torch is built without CUDA", "install a CUDA build of torch to use a GPU"
    else:
        why = f"torch is built for CUDA {torch.version.cuda}, and sees no device"
        do = (
            "see whether nvidia-smi lists a GPU, and whether its driver is new enough for this CUDA"
        )
    yield Check(name, NOT_HERE, why, do)


def _backends(name: str) -> Iterator[Check]:
    for backend, (available, wanted) in launcher.communication_backends().items():
        if available:
            yield Check(backend, OK, "torch has it", needed=wanted)
        else:
            do = "install a build of torch that has it, to run several ranks" if wanted else ""
            status = FAILED if wanted else NOT_HERE
            yield Check(backend, status, "this torch is built without it", do, needed=wanted)


def _scheduling(name: str) -> Iterator[Check]:
    with communication_first(launcher.rank_device().type) as first:
        pass
    why = "not before those that compute: ranks are not on the host, or CAP_SYS_NICE is missing"
    there = "before those that compute: collectives of ranks on the host wait less"
    yield Check(name, OK, there) if first else Check(name, NOT_HERE, why)


def _compiler(name: str) -> Iterator[Check]:
    try:
        yield Check(name, OK, inductor.cpp_compiler(), needed=True)
    except Exception as error:  # torch raises its own, which moved between versions
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        do = "install g++ (apt-get install g++), or set CXX to a compiler; or use lowering='eager'"
        yield Check(name, FAILED, why, do, needed=True)


def cache_check(directory: str) -> Check:
    """Whether inductor's cache can be written."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"stepgraph")
    except OSError as error:
        do = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        return Check("inductor cache", FAILED, f"{directory}: {error.strerror}", do, needed=True)
    return Check("inductor cache", OK, directory, needed=True)


_CHECKS: dict[str, Callable[[str], Iterable[Check]]] = {
    "stepgraph": _version,
    "python": _python,
    "torch": lambda name: [torch_check(torch.__version__)],
    "transformers": _version,
    "host": _host,
    "GPU": _accelerators,
    "communication": _backends,
    "communication threads": _scheduling,
    "C++ compiler": _compiler,
    "inductor cache": lambda name: [cache_check(inductor.cache_directory())],
}
