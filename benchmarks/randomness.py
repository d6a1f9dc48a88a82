"""What stepgraph's dropout costs beside F.dropout, forward, on one thread, in both lowerings.

    python benchmarks/randomness.py --json benchmarks/results/randomness.json

Masks are a function of (seed, step, operation, position), so nothing is saved that could not be drawn
again. Contestants take turns round by round; a ratio is the median over rounds of their times in the
same round.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import stepgraph


class Drop(nn.Module):
    """Dropout whether the module trains or not, so that `evaluate` measures the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mask of its own at every call."""
        return F.dropout(x, 0.1, training=True)


def stepgraph_dropout(lowering: str, x: torch.Tensor):
    """Dropout in an Engine of its own."""
    engine = stepgraph.Engine(Drop(), loss=lambda m, b: m(b), lowering=lowering)
    return lambda: engine.evaluate(x)


def torch_dropout(compiled: bool, x: torch.Tensor):
    """F.dropout, plain or under torch.compile."""
    model = Drop()
    run = torch.compile(model) if compiled else model

    def forward():
        with torch.no_grad():
            return run(x)

    return forward


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {"torch": torch.__version__, "machine": platform.machine(), "shapes": {}}
    for shape in ((64, 512), (512, 4096)):
        x = torch.randn(shape)
        contestants = {
            "F.dropout": torch_dropout(False, x),
            "F.dropout, torch.compile": torch_dropout(True, x),
            "stepgraph eager": stepgraph_dropout("eager", x),
            "stepgraph inductor": stepgraph_dropout("inductor", x),
        }
        times = {name: [] for name in contestants}
        for run in contestants.values():
            for _ in range(3):
                run()
        for _ in range(arguments.rounds):
            for name, run in contestants.items():
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
        table = Table("contestant", "ms", "of F.dropout", title=f"dropout of {list(shape)} floats")
        rows = {}
        for name, each in times.items():
            ratio = statistics.median(a / b for a, b in zip(each, times["F.dropout"], strict=True))
            rows[name] = {"ms": round(statistics.median(each), 3), "ratio": round(ratio, 3)}
            table.add_row(name, f"{rows[name]['ms']:.3f}", f"{ratio:.2f}")
        result["shapes"]["x".join(map(str, shape))] = rows
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
