"""What each of the two ranks does in `step_time.py`: build contestants, run them, time them."""

import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, PEERS, SIZES, Batch, Step, make_batches, make_model

WORLD_SIZE = 2
AGAIN = "_again"  # a second, identical copy of a peer: how far apart two equals measure


@dataclass(frozen=True)
class Settings:
    """What one pair of processes is asked to do; `scratch` is a folder of its own."""

    size: str
    contestants: tuple[str, ...]
    vocabulary: int
    steps: int
    rounds: int
    warmup: int
    profile: bool
    scratch: str
    variants: dict[str, str] = field(default_factory=dict)


@dataclass
class Runner:
    """A contestant that has been built, and what is known about it so far."""

    name: str
    step: Step
    batches: list[Batch]
    record: dict[str, Any]
    taken: int = 0

    def __call__(self) -> torch.Tensor:
        """Take one step on the next batch."""
        self.taken += 1
        return self.step(self.batches[self.taken % len(self.batches)])


class Bench:
    """One rank's side of the benchmark. Every method is called by both ranks in the same order."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.settings = settings
        self.size = SIZES[settings.size]
        # Agreement between ranks has a group of its own, so that it cannot be mistaken for a
        # collective of a contestant that failed half way; it waits longer than they do.
        self.control = dist.new_group(timeout=timedelta(minutes=30))

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(values, value, group=self.control)
        return values

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run `action` on both ranks; its value, or the first error where any rank failed."""
        value, error = None, None
        try:
            value = action()
        except Exception as caught:
            last = traceback.extract_tb(caught.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            error = f"{type(caught).__name__}: {caught} ({where}, rank {self.rank})"
        errors = [e for e in self.share(error) if e is not None]
        return (None, errors[0]) if errors else (value, None)

    def build(self, name: str, variant: str, cache: str | None = None) -> Runner | dict[str, Any]:
        """Build a contestant and warm it up; the record with its error where that fails."""
        record: dict[str, Any] = {"variant": variant}
        self._use_cache(cache or f"{name}-{variant}")
        model = make_model(self.size, self.settings.vocabulary)
        record["resident_with_model_mib"] = _resident_mib("VmRSS")
        record["parameters"] = sum(p.numel() for p in model.parameters())
        batches = make_batches(self.size, self.settings.vocabulary, self.rank)
        builder = CONTESTANTS[name.removesuffix(AGAIN)][variant]

        def warm_up() -> Runner:
            start = time.perf_counter()
            runner = Runner(name, builder(model), batches, record)
            built = time.perf_counter()
            runner()
            first = time.perf_counter()
            for _ in range(self.settings.warmup - 1):
                loss = runner()
            record["build_seconds"] = round(built - start, 3)
            record["first_step_seconds"] = round(first - built, 3)
            record["loss_after_warmup"] = float(loss)
            return runner

        runner, record["error"] = self.attempt(warm_up)
        if runner is None:
            return record
        # The mean over ranks: DDP and FSDP2 return each rank's own loss. Equal for all contestants.
        losses = self.share(record["loss_after_warmup"])
        record["loss_after_warmup"] = round(sum(losses) / len(losses), 5)
        return runner

    def _use_cache(self, name: str) -> None:
        """Give the next compilation an empty cache on disk, which the ranks of a host share."""
        from torch._inductor.utils import clear_caches

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(self.settings.scratch, "cache", name))
        clear_caches()

    def turn(self, runner: Runner) -> tuple[list[float] | None, str | None]:
        """Times in ms of `steps` steps in a row, each that of the slower rank."""

        def run() -> list[float]:
            times = []
            for _ in range(self.settings.steps + 1):
                start = time.perf_counter()
                runner()
                times.append((time.perf_counter() - start) * 1e3)
            return times[1:]  # the first one finds another contestant's data in the caches

        compiled = _compiled_graphs()
        dist.barrier(group=self.control)
        times, error = self.attempt(run)
        if extra := _compiled_graphs() - compiled:  # then this turn holds a compilation
            earlier = runner.record.get("graphs_compiled_in_turns", 0)
            runner.record["graphs_compiled_in_turns"] = earlier + extra
        if times is None:
            return None, error
        return [max(pair) for pair in zip(*self.share(times), strict=True)], None

    def fastest_variant(self, name: str) -> Runner | dict[str, Any]:
        """Build every variant of a contestant, and keep the one that was fastest in a trial."""
        wanted = self.settings.variants.get(name)
        variants = [wanted] if wanted is not None else list(CONTESTANTS[name])
        if len(variants) == 1:
            return self.build(name, variants[0])
        built = {variant: self.build(name, variant) for variant in variants}
        runners = {v: r for v, r in built.items() if isinstance(r, Runner)}
        if not runners:
            return built[variants[0]]  # type: ignore[return-value]
        times: dict[str, list[float]] = {variant: [] for variant in runners}
        for _ in range(3):
            for variant, runner in runners.items():
                times[variant] += self.turn(runner)[0] or [float("inf")]
        medians = {variant: statistics.median(t) for variant, t in times.items()}
        best = runners[min(medians, key=medians.__getitem__)]
        best.record["variants_median_ms"] = {v: round(m, 3) for v, m in medians.items()}
        return best

    def prepare(self) -> tuple[list[Runner], dict[str, dict[str, Any]]]:
        """Build everybody, and a second copy of every peer; runners, and records of failures."""
        names = self.settings.contestants
        runners: list[Runner] = []
        failed: dict[str, dict[str, Any]] = {}

        def add(name: str, built: Runner | dict[str, Any]) -> None:
            if isinstance(built, Runner):
                runners.append(built)
            else:
                failed[name] = built
            if self.rank == 0:
                error = failed.get(name, {}).get("error")
                print(f"  {self.settings.size} {name}: {error or 'ready'}", flush=True)

        for name in names:
            add(name, self.fastest_variant(name))
            gc.collect()
        peers = [r for r in runners if r.name in PEERS.values()]
        for peer in peers:
            variant = peer.record["variant"]
            add(peer.name + AGAIN, self.build(peer.name + AGAIN, variant, f"{peer.name}-{variant}"))
        return runners, failed

    def measure(self) -> dict[str, dict[str, Any]]:
        """All contestants, interleaved: in every round each takes its turn, in a rotated order."""
        runners, records = self.prepare()
        rounds: dict[str, list[list[float]]] = {runner.name: [] for runner in runners}
        for runner in runners:
            records[runner.name] = runner.record
        for runner in runners:
            # A turn that does not count: tracing a model anew may drop compiled code of its copies.
            _, runner.record["error"] = self.turn(runner)
            runner.record.pop("graphs_compiled_in_turns", None)
        gc.collect()
        gc.freeze()  # what the others keep alive is not a contestant's to sweep
        for index in range(self.settings.rounds):
            shift = index % max(len(runners), 1)
            for runner in runners[shift:] + runners[:shift]:
                if runner.record["error"] is None:
                    times, runner.record["error"] = self.turn(runner)
                    rounds[runner.name].append(times or [])
        for runner in runners:
            done = [times for times in rounds[runner.name] if times]
            if runner.record["error"] is None and done:
                runner.record["median_ms"] = statistics.median(t for times in done for t in times)
                runner.record["round_median_ms"] = [statistics.median(times) for times in done]
            wanted = self.settings.profile and not runner.name.endswith(AGAIN)
            if wanted and runner.record["error"] is None:
                profile, error = self.attempt(lambda r=runner: profile_steps(r))
                runner.record["profile"] = profile or {"error": error}
        return records


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


CATEGORIES = {
    "optimizer": ("adam", "optimizer."),
    "collectives": ("c10d", "gloo", "all_reduce", "allreduce", "all_gather", "allgather")
    + ("reduce_scatter", "wait_tensor", "record_param_comms", "fsdp::"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "mkl"),
    "generated code": ("compiledfxgraph", "cpp_fused", "graph_"),
    "other operators": ("aten::", "inductor::"),
}


def _category(name: str) -> str:
    """The first category one of whose words is in an event's name; else Python, or waiting."""
    lower = name.lower()
    found = (c for c, words in CATEGORIES.items() if any(word in lower for word in words))
    return next(found, "python, waiting")


def profile_steps(runner: Runner, steps: int = 10) -> dict[str, Any]:
    """Self time in ms of one step by kind of work: on the thread that steps, and on others."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function("benchmark_step"):
                runner()
    events = profiler.events() or []
    main = next(event.thread for event in events if event.name == "benchmark_step")
    taken = sum(event.cpu_time_total for event in events if event.name == "benchmark_step")
    result: dict[str, Any] = {"steps": steps, "profiled_step_ms": round(taken / 1e3 / steps, 3)}
    result |= {"stepping_thread_ms": {}, "other_threads_ms": {}}
    for event in events:
        here = event.thread == main and not event.is_async
        kinds = result["stepping_thread_ms" if here else "other_threads_ms"]
        kind = _category(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + event.self_cpu_time_total / 1e3 / steps
    for place in ("stepping_thread_ms", "other_threads_ms"):
        kinds = sorted(result[place].items(), key=lambda item: -item[1])
        result[place] = {kind: round(ms, 3) for kind, ms in kinds}
    return result


def _resident_mib(which: str) -> float | None:
    """`VmRSS` (now) or `VmHWM` (the most so far) of this process in MiB; None but on Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(which + ":")), None)


def measure_memory(bench: Bench, name: str) -> dict[str, Any]:
    """Peak resident memory in MiB of the only contestant of this process, above its model's."""
    # All imported here, so that no contestant's own modules count.
    import torch._inductor.compile_fx
    import torch.distributed.fsdp  # noqa: F401

    before = _resident_mib("VmRSS")
    import stepgraph.api.engine  # noqa: F401

    modules = _resident_mib("VmRSS") - before
    built = bench.fastest_variant(name)
    if not isinstance(built, Runner):
        return {"error": built["error"]}
    base = built.record["resident_with_model_mib"]
    peak = _resident_mib("VmHWM") - base
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    _, error = bench.turn(built)
    steady = _resident_mib("VmHWM") - base
    worst = [max(pair) for pair in zip(*bench.share((max(peak, steady), steady)), strict=True)]
    return {
        "error": error,
        "peak_with_compilation_mib": round(worst[0], 1),
        "peak_of_steady_steps_mib": round(worst[1], 1),
        "modules_of_stepgraph_mib": round(modules, 1),
    }


def run_rank(rank: int, settings: Settings, memory_of: str | None) -> None:
    """A spawned process: measure the times of everybody, or the memory of one contestant."""
    torch.set_num_threads(1)
    store = f"file://{settings.scratch}/store"
    dist.init_process_group(
        "gloo", store, timeout=timedelta(minutes=10), rank=rank, world_size=WORLD_SIZE
    )
    bench = Bench(rank, settings)
    result = measure_memory(bench, memory_of) if memory_of else bench.measure()
    if rank == 0:
        Path(settings.scratch, "result.json").write_text(json.dumps(result))
    dist.barrier(group=bench.control)
    dist.destroy_process_group()
