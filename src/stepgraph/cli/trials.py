"""What the doctor tries in a process of its own, as it could hang or die: a compiler, ranks, a capture.

Each has a time limit. Compilations go to a folder that is removed afterwards.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stepgraph.cli import launcher

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
    code = f"from stepgraph.cli import trials; trials.run_trial({name!r})"
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


def _eager() -> str:
    train_one_step("eager")
    return f"a step agrees with plain PyTorch on {launcher.rank_device()}"


def _inductor() -> str:
    train_one_step("inductor")
    return f"a step compiles, and agrees with plain PyTorch on {launcher.rank_device()}"


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
    "eager lowering": Trial(_eager, "run `python -m pytest` of stepgraph, and report what fails"),
    "inductor lowering": Trial(
        _inductor, "see the C++ compiler above; until it works, use lowering='eager'"
    ),
    "ranks": Trial(
        _ranks,
        "ranks talk over 127.0.0.1: see whether a firewall or a container forbids it, and whether "
        "/dev/shm and the temporary folder can be written",
    ),
    "CUDA graphs": Trial(_graphs, "use lowering='inductor'", needed=False),
}
