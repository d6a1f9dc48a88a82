"""One rank of a run in which something differs between ranks.

python -m tests.end_to_end.ranks_apart CASE
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.runtime import compiler
from stepgraph.runtime.checkpoints.manifest import FileRecord

STEPS, ODD_STEP = 6, 3


class Plain(nn.Module):
    """Captured whole."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, width), nn.Linear(width, 1), 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean() * self.scale


class Branching(nn.Module):
    """Looks at its rows: graph by graph. One branch is as large as the other, or not."""

    def __init__(self, other=8):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.b, self.c = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, other), nn.Linear(other, 8))
        self.d = nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        if x.mean().item() > 0:
            h = self.b(h)
        elif x.sum().item() > -1e9:
            h = self.c(h) if self.c[0].out_features != 8 else self.d(h)
        return h.square().mean()


def differs():
    """Says when it was that ranks began to differ."""
    print(f"differs at {time.time()}", flush=True)


def late(function):
    """The same, after a while."""

    def called(*args):
        time.sleep(float(os.environ["LATE"]))
        return function(*args)

    return called


def main(case: str) -> None:
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    odd = rank == int(os.environ["WORLD_SIZE"]) - 1
    branching = {"branches": 8, "branches of other sizes": 24}
    model = Branching(branching[case]) if case in branching else Plain()
    plan = "zero3"
    if odd and case == "another model":
        model = Plain(width=16)
    if odd and case == "another plan":
        plan = "ddp"
    settings = {"micro_batches": 2} if odd and case == "another setting" else {}
    if "another" in case:
        differs()
    engine = stepgraph.Engine(
        model, loss=lambda m, x: m(x), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=plan,
        lowering="eager", **settings,
    )  # fmt: skip
    x = torch.randn(4, 3, 6).abs() if case == "lengths" else torch.randn(4, 6).abs()
    for step in range(STEPS):
        batch, now = x, odd and step == ODD_STEP
        if now:
            differs()
        if now and case == "rows":
            batch = x[:2]
        if now and case == "lengths":
            batch = x[:, :2]
        if now and case == "types":
            batch = x.double()
        if now and case.startswith("branches"):
            batch = -x
        if now and case == "a value":
            model.scale = 2.0
        if now and case == "an exception":
            raise ValueError("a rank's own")
        if now and case == "an exit":
            sys.exit(3)
        if now and case == "a missing step":
            continue
        if now and case == "evaluation":
            engine.evaluate(batch)
            continue
        if now and case == "a late batch":
            time.sleep(float(os.environ["LATE"]))
        if step == ODD_STEP and case == "a late save":
            if odd:
                FileRecord.of = late(FileRecord.of)
            engine.save(os.environ["SAVED"])
        if step == ODD_STEP and case == "a late program":
            batch = x[:2]
            if odd:
                compiler.capture_of = late(compiler.capture_of)
        print(f"step {step}: {float(engine.step(batch)):.6f}", flush=True)
    if case == "a missing step":
        engine.evaluate(x)
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
