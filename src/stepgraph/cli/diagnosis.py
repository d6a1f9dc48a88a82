"""Looks at this machine: versions, devices, and what works, by trying it. Nothing is changed.

What could hang or die (a compiler, ranks, a capture) is tried in a process of its own, with a time limit;
compilations go to a folder that is removed afterwards.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from stepgraph.cli import launcher
from stepgraph.runtime.host_memory import host_memory_bytes
from stepgraph.runtime.ranks import communication_first
from stepgraph.torch_internals import compiler

TESTED_TORCH = ("2.11", "2.13")
_PYTHON = (3, 11)
OK, FAILED, NOT_HERE = "ok", "failed", "not here"
SECONDS = 300.0  # for one trial; a cold C++ compiler on a busy machine takes a minute


@dataclass(frozen=True)
class Check:
    """One line of the report.

    ``found``: what there is, or why it does not work. ``do``: what to do about it. ``needed``: without it
    training does not work here.
    """

    name: str
    status: str
    found: str
    do: str = ""
    needed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed is missing."""
        return self.status == OK or not self.needed


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
    if oldest <= _numbers(version) <= newest:
        return Check("torch", OK, version, needed=True)
    too_old = _numbers(version) < oldest
    do = f"{'install' if too_old else 'if something fails, try'} torch {TESTED_TORCH[1]}"
    return Check("torch", FAILED if too_old else OK, f"{version}; {tested}", do, needed=True)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _host(name: str) -> Iterator[Check]:
    cores = launcher.threads_per_rank(1)
    yield Check(name, OK, f"{cores} cores, {host_memory_bytes() / 2**30:.1f} GiB of memory")


def _accelerators(name: str) -> Iterator[Check]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        versions = f"CUDA {torch.version.cuda}, driver for CUDA {compiler.cuda_driver_version()}"
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
        yield Check(name, OK, compiler.cpp_compiler(), needed=True)
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
    "inductor cache": lambda name: [cache_check(compiler.cache_directory())],
}


# -- what is tried


def try_out(
    name: str, seconds: float = SECONDS, environment: Mapping[str, str] | None = None
) -> Check:
    """Runs one of :data:`TRIALS` in a process of its own; it counts as failed after so many seconds."""
    trial = TRIALS[name]
    if name == "CUDA graphs" and not torch.cuda.is_available():
        return Check(name, NOT_HERE, "there is no CUDA device")
    # Not what a launcher of ranks told this process, and nothing that was compiled before.
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in ranks}
    code = f"from stepgraph.cli import diagnosis; diagnosis.run_trial({name!r})"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stepgraph-doctor-") as directory:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": directory, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=inherited | fresh | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # ranks that it started are stopped with it
            try:
                process.communicate(timeout=launcher.SHUTDOWN_SECONDS + 7)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            why = f"it did not end within {seconds:.0f} s"
            return Check(name, FAILED, why, trial.do, needed=trial.needed)
    took = f"{time.perf_counter() - start:.0f} s"
    if process.returncode == 0:
        return Check(name, OK, f"{output.splitlines()[-1]}; {took}", needed=trial.needed)
    lines = [line for line in errors.splitlines() if line.strip()]
    why = lines[-1].strip() if lines else f"it ended with exit code {process.returncode}"
    return Check(name, FAILED, why, trial.do, needed=trial.needed)


def run_trial(name: str) -> None:
    """In the process of a trial: prints what worked; raises, the reason as its last line."""
    try:
        print(TRIALS[name].run())
    except Exception as error:
        what = getattr(error, "what", None) or str(error)
        first = next((line for line in what.splitlines() if line.strip()), "")
        cause = error.__cause__ if getattr(error, "what", None) is None else None
        if cause is not None and str(cause).strip():
            first += f" ({str(cause).strip().splitlines()[0]})"
        print(f"{type(error).__name__}: {first}", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True)
class Trial:
    """Something to try: ``run`` returns what worked, or raises."""

    run: Callable[[], str]
    do: str
    needed: bool = True


def train_one_step(lowering: str) -> float:
    """The loss of a small step on this rank, which is compared with plain PyTorch's."""
    from stepgraph.api.engine import Engine

    torch.manual_seed(0)
    device = launcher.rank_device()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    batch, rank = torch.linspace(-1, 1, 16).view(4, 4), int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    expected = model(batch).square().mean().item()
    model = model.to(device)
    engine = Engine(
        model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lowering=lowering,
    )
    loss = engine.step(batch.chunk(ranks)[rank].to(device)).item()
    if abs(loss - expected) > 1e-5 * abs(expected):
        raise ArithmeticError(f"the loss is {loss}, and {expected} in plain PyTorch")
    return loss


def _step(lowering: str, does: str) -> str:
    train_one_step(lowering)
    return f"a step {does} with plain PyTorch on {launcher.rank_device()}"


def _ranks() -> str:
    first, second = launcher.launch(train_one_step, "eager", ranks=2)
    if first != second:
        raise ArithmeticError(f"the ranks' losses differ: {first} and {second}")
    return "2 ranks start, talk, and agree with plain PyTorch"


def _graphs() -> str:
    device = launcher.rank_device()
    x = torch.ones(8, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.mul_(1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    if x.sum().item() != 16:
        raise ArithmeticError("a replay gave another result")
    return f"a graph is captured and replayed on {device}"


TRIALS = {
    "eager lowering": Trial(
        partial(_step, "eager", "agrees"),
        "run `python -m pytest` of stepgraph, and report what fails",
    ),
    "inductor lowering": Trial(
        partial(_step, "inductor", "compiles, and agrees"),
        "see the C++ compiler above; until it works, use lowering='eager'",
    ),
    "ranks": Trial(
        _ranks,
        "ranks talk over 127.0.0.1: see whether a firewall or a container forbids it, and whether "
        "/dev/shm and the temporary folder can be written",
    ),
    "CUDA graphs": Trial(_graphs, "use lowering='inductor'", needed=False),
}
