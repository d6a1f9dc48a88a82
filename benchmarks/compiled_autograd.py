"""What compiled autograd gains, and what a graph break costs.

    python benchmarks/compiled_autograd.py --json benchmarks/results/compiled_autograd.json

`blocks`: many small custom autograd functions with a hook and a graph break between them, forward and
backward compiled (inductor), with and without compiled autograd. `plain`: the same functions, wider, with
one break and no hook. `transformer`: two large graphs, where it should not help. All on one process and on
two gloo ranks (zero3). `breaks`: step time of one model with 0, 1, 2 and 8 graph breaks under zero3, beside
FSDP2 + torch.compile on the same model.
Contestants take turns round by round; a ratio is the median over rounds of two times of one round.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

WIDTH, ROWS = 32, 16


class Scale(torch.autograd.Function):
    """A small custom function with a backward of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        """``x * factor``."""
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        """Several small operations."""
        (factor,) = ctx.saved_tensors
        return (gradient * factor).clamp(-1e3, 1e3) + 0.0 * gradient.sin(), None


@torch._dynamo.disable
def between(x, hook):
    """What no graph captures: a break, and if asked a hook that no graph has."""
    if hook and x.requires_grad:
        x.register_hook(lambda gradient: gradient * 1.0)
    return x


def pieces(count, hooks=False):
    """A forward of so many pieces with a break between any two.

    Written out, for dynamo compiles nothing of a function that breaks inside a loop.
    """
    lines = ["def forward(self, x):", "    x = self.piece(x, 0)"]
    for number in range(1, count):
        lines += [f"    x = between(x, {hooks})", f"    x = self.piece(x, {number})"]
    written = {"between": between}
    exec("\n".join([*lines, "    return x.square().mean()"]), written)
    return written["forward"]


def part(layers, number, count):
    """Those of the layers that are in a piece."""
    return layers[number * len(layers) // count : (number + 1) * len(layers) // count]


def blocks(layers, breaks, width=WIDTH, hooks=True):
    """Layers with a custom function each; as many breaks, as evenly as can be."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.register_buffer("factor", torch.full((width,), 1.01))

        def piece(self, x, number):
            for layer in part(self.layers, number, breaks + 1):
                x = x + Scale.apply(torch.tanh(layer(x)), self.factor)
            return x

        forward = pieces(breaks + 1, hooks)

    return Blocks()


def transformer(layers, width):
    """Encoder layers: two large graphs of large operations."""

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )

        def piece(self, x, number):
            for layer in part(self.layers, number, 2):
                x = layer(x)
            return x

        forward = pieces(2)

    return Transformer()


def ours(whole, make=blocks, **shape):
    """stepgraph's engine, graph by graph."""

    def build():
        import stepgraph

        torch.manual_seed(0)
        model = make(**shape)
        engine = stepgraph.Engine(
            model,
            loss=lambda model, batch: model(batch),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            plan="zero3",
        )
        engine.compile("inductor", compiled_autograd=whole)

        def step(batch):
            loss = engine(batch)
            loss.backward()
            engine.optimizer_step()
            return loss.detach()

        return step

    return build


def fsdp2(**shape):
    """FSDP2 on every layer and the root, the model compiled."""

    def build():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = blocks(**shape)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        call = torch.compile(model, isolate_recompiles=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(batch):
            loss = call(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return build


HOOKED = {"layers": 16, "breaks": 15}
PLAIN = {"layers": 16, "breaks": 1, "width": 256, "hooks": False}
LARGE = {"make": transformer, "layers": 4, "width": 256}
GAIN = {
    "blocks": (ours(False, **HOOKED), None),
    "blocks, compiled autograd": (ours(True, **HOOKED), "blocks"),
    "blocks again": (ours(False, **HOOKED), "blocks"),
    "plain": (ours(False, **PLAIN), None),
    "plain, compiled autograd": (ours(True, **PLAIN), "plain"),
    "transformer": (ours(False, **LARGE), None),
    "transformer, compiled autograd": (ours(True, **LARGE), "transformer"),
}
BREAKS = {}
for count in (0, 1, 2, 8):
    kind = {"layers": 8, "breaks": count, "width": 128, "hooks": False}
    BREAKS[f"fsdp2, {count} breaks"] = (fsdp2(**kind), None)
    BREAKS[f"stepgraph, {count} breaks"] = (ours(False, **kind), f"fsdp2, {count} breaks")


# What a rank's batch looks like.
BATCHES = {
    ("gain", "blocks"): (ROWS, WIDTH),
    ("gain", "blocks again"): (ROWS, WIDTH),
    ("gain", "plain"): (ROWS, PLAIN["width"]),
    ("gain", "transformer"): (8, 64, LARGE["width"]),
    ("breaks", "fsdp2"): (ROWS, 128),
    ("breaks", "stepgraph"): (ROWS, 128),
}


def run_rank(which, rounds, steps):
    """One rank: milliseconds a step by contestant and round, and losses."""
    import logging

    logging.getLogger("stepgraph").setLevel(logging.ERROR)
    together = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    contestants = {"gain": GAIN, "breaks": BREAKS}[which]
    built, losses = {}, {}
    for name, (builder, _) in contestants.items():
        generator = torch.Generator().manual_seed(1 + rank)
        batch = torch.randn(BATCHES[which, name.split(",")[0]], generator=generator)
        step = builder()
        for _ in range(3):
            losses[name] = float(step(batch))
        built[name] = (step, batch)
        if rank == 0:
            print(f"  {which} on {ranks}: {name} ready", flush=True)
    times = {name: [] for name in built}
    for _ in range(rounds):
        for name, (step, batch) in built.items():
            if together:
                dist.barrier()
            taken = []
            for _ in range(steps):
                start = time.perf_counter()
                step(batch)
                taken.append((time.perf_counter() - start) * 1e3)
            each = [statistics.median(taken)] * ranks
            if together:
                dist.all_gather_object(each, each[rank])
            times[name].append(max(each))
    return times, losses, {name: peer for name, (_, peer) in contestants.items()}


def main() -> None:
    """The command line."""
    from stepgraph.cli.launcher import launch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    runs = {
        "one process": lambda: run_rank("gain", arguments.rounds, arguments.steps),
        "two ranks": lambda: launch(run_rank, "gain", arguments.rounds, arguments.steps, ranks=2)[
            0
        ],
        "graph breaks, two ranks": lambda: launch(
            run_rank, "breaks", arguments.rounds, arguments.steps, ranks=2
        )[0],
    }
    for title, run in runs.items():
        times, losses, peers = run()
        table = Table(title=title)
        for column in ("contestant", "step ms", "of peer", "min", "max"):
            table.add_column(column, justify="left" if column == "contestant" else "right")
        records = report[title] = {}
        for name, rounds in times.items():
            record = records[name] = {"median_ms": statistics.median(rounds), "rounds_ms": rounds}
            record["loss_after_warmup"] = losses[name]
            row = [name, f"{record['median_ms']:.2f}", "", "", ""]
            if (peer := peers[name]) is not None:
                values = [a / b for a, b in zip(rounds, times[peer], strict=True)]
                record |= {"peer": peer, "ratio_to_peer": statistics.median(values)}
                row[2:] = [
                    f"{v:.3f}" for v in (statistics.median(values), min(values), max(values))
                ]
            table.add_row(*row)
        Console().print(table)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
