"""What compiling gains and what the graph gains, on one GPU: Llamas of three sizes, one step.

    python benchmarks/cuda_graph.py --json benchmarks/results/cuda_graph.json

Each contestant has a fresh process. Some compile at once (so that the seconds until they are warm are
beside others), then their rounds take turns, one at a time; a time is the median over rounds, launches are
those of one step by torch's profiler. A contestant that fails is reported with its error; others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from contestants import Size
from torch import Tensor, nn

PEAK_FLOPS = {"h100": 989e12, "h200": 989e12, "a100": 312e12}  # bf16, dense
LEARNING_RATE, WARM_UP, ROUNDS = 3e-4, 5, 10
Step = Callable[[dict[str, Tensor]], Tensor]

SIZES = {
    "launch-bound": Size(8, 256, 4, 688, 4, 128, 20),
    "medium": Size(12, 1024, 16, 2752, 8, 1024, 5),
    "1B": Size(16, 2048, 32, 5632, 4, 2048, 2),
}


def make_model(size: Size, device: str = "cuda") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=size.width, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.heads, max_position_embeddings=size.tokens, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def make_batch(size: Size, device: str = "cuda") -> dict[str, Tensor]:
    ids = torch.randint(32000, (size.batch, size.tokens), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def plain(mode: str | None) -> Callable[[nn.Module, dict], Step]:
    """The usual loop, in bfloat16 by autocast; ``mode``: of torch.compile, None: eager."""

    def make(model: nn.Module, batch: dict) -> Step:
        call = model if mode is None else torch.compile(model, mode=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

        def step(batch: dict) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach().clone()  # the next step writes over what a graph returned

        return step

    return make


def captured_by_hand(model: nn.Module, batch: dict) -> Step:
    """``torch.cuda.graph`` around the whole of an eager step, with a capturable optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=True)
    static = {name: tensor.clone() for name, tensor in batch.items()}

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(**static).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()

    def step(batch: dict) -> Tensor:
        for name, tensor in batch.items():
            static[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss.clone()

    return step


def graphed_callables(model: nn.Module, batch: dict) -> Step:
    """``torch.cuda.make_graphed_callables`` of forward and backward; the optimizer is eager."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                return self.model(input_ids=input_ids, labels=labels).loss

    call = torch.cuda.make_graphed_callables(Loss(), (batch["input_ids"], batch["labels"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: dict) -> Tensor:
        loss = call(batch["input_ids"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(**batch).loss


def ours(lowering: str, autocast: bool = False) -> Callable[[nn.Module, dict], Step]:
    """``autocast``: types as in the usual loop; else everything is computed in bfloat16, as under FSDP2."""

    def make(model: nn.Module, batch: dict) -> Step:
        import stepgraph

        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        how: dict = {"loss": in_autocast} if autocast else {"compute_dtype": torch.bfloat16}
        engine = stepgraph.Engine(model, optimizer=optimizer, plan="ddp", lowering=lowering, **how)
        return engine.step

    return make


CONTESTANTS: dict[str, Callable[[nn.Module, dict], Step]] = {
    "eager": plain(None),
    "compile": plain("default"),
    "compile reduce-overhead": plain("reduce-overhead"),
    "compile max-autotune": plain("max-autotune"),
    "captured by hand": captured_by_hand,
    "make_graphed_callables": graphed_callables,
    "stepgraph inductor": ours("inductor"),
    "stepgraph cuda_graph": ours("cuda_graph"),
    "stepgraph cuda_graph in autocast": ours("cuda_graph", autocast=True),
}


def predict(size: Size) -> dict[str, float]:
    """What the cost model says of our step, which a laptop can ask."""
    import stepgraph

    model, batch = make_model(size, "meta"), make_batch(size, "meta")
    how = {"placement": "ddp", "device": "h200", "compute_dtype": torch.bfloat16}
    found = stepgraph.plan(model, example=batch, mesh="dp=1", **how).predicted
    return {"step_ms": found.step_ms, "mfu": found.mfu, "peak_gib": found.peak_bytes / 2**30}


def launches(step: Step, batch: dict) -> int:
    """How often the host launches something in one step: kernels, copies, graphs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(batch)
        torch.cuda.synchronize()
    named = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(row.count for row in seen.key_averages() if row.key.startswith(named))


def compete(name: str, size_name: str) -> None:
    """One contestant in this process: says that it is warm, then times a round for each line it is sent."""
    size = SIZES[size_name]
    torch.set_float32_matmul_precision("high")
    model, batch = make_model(size), make_batch(size)
    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    step = CONTESTANTS[name](model, batch)
    first = [step(batch) for _ in range(WARM_UP)]
    torch.cuda.synchronize()
    told = {"until_warm_seconds": time.perf_counter() - start, "first_loss": first[0].item()}
    print(json.dumps(told), flush=True)
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(size.steps):
            loss = step(batch)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / size.steps)
        print(json.dumps({"step_ms": 1e3 * times[-1]}), flush=True)
    tokens, seconds = size.batch * size.tokens, statistics.median(times)
    attention = 12 * size.layers * size.width * size.tokens
    flops = (6 * parameters + attention) * tokens
    card = torch.cuda.get_device_name().lower()
    peak = next((value for key, value in PEAK_FLOPS.items() if key in card), None)
    found = {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": None if peak is None else flops / seconds / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "launches": launches(step, batch),
        "parameters": parameters,
        "last_loss": loss.item(),
    }
    print(json.dumps(told | found), flush=True)


class Contestant:
    """A process that trains one size in one way; ``found``: its result, or what went wrong."""

    def __init__(self, name: str, size: str, patience: float) -> None:
        self.name, self.patience = name, patience
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as this
        command = [sys.executable, __file__, "--one", name, size]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )
        self.found: dict | None = None

    def hear(self) -> None:
        """Waits for its next line; one that ends or is too late is out."""
        assert self.process.stdout is not None
        start = time.monotonic()
        timer = threading.Timer(self.patience, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            self.last = json.loads(line)
            return
        late = time.monotonic() - start >= self.patience
        self.found = {"error": "too late" if late else self._error()}

    def _error(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["it ended"])[-1]

    def time_a_round(self) -> None:
        """While the others wait."""
        if self.found is None:
            assert self.process.stdin is not None
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.hear()

    def finish(self) -> dict:
        """Its result; its memory is free behind it."""
        if self.found is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.hear()
            self.found = self.found or self.last
        self.process.kill()
        self.process.wait()
        return self.found


def contest(names: list[str], size: str, patience: float, rounds: int) -> dict[str, dict]:
    """All compile at once, then each times a round in turn, so many times, while the others wait."""
    contestants = [Contestant(name, size, patience) for name in names]
    start = time.monotonic()
    for each in contestants:
        each.patience = max(1.0, start + patience - time.monotonic())
        each.hear()
        each.patience = patience
    for _ in range(rounds):
        for each in contestants:
            each.time_a_round()
    return {each.name: each.finish() for each in contestants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--at-once", type=int, default=4, help="as many as the memory holds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one contestant")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "SIZE"), help="in this process")
    parser.add_argument("--predict", action="store_true", help="only what the cost model says")
    given = parser.parse_args()
    if given.predict:
        for size in given.sizes.split(","):
            print(size, json.dumps(predict(SIZES[size])), flush=True)
        return
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA device: what can be seen without one is in tests/graphs")
    if given.one:
        compete(*given.one)
        return
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    names, rows = given.contestants.split(","), {}
    for size in given.sizes.split(","):
        rows[size] = {}
        for i in range(0, len(names), given.at_once):
            found = contest(names[i : i + given.at_once], size, given.patience, given.rounds)
            for name, row in found.items():
                print(size, name, json.dumps(row), flush=True)
            rows[size] |= found
            if given.json:
                given.json.write_text(json.dumps(about | {"sizes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
