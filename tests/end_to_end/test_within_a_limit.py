"""A process that may take no more than so much memory ends under ``none``, and trains under a budget."""

import subprocess
import sys

import pytest

BUDGET_MIB, LIMIT_MIB = 1536, 2048

SCRIPT = f"""
import resource, sys
import torch
from torch import nn
import stepgraph

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

torch.manual_seed(0)
model = nn.Sequential(*(Block(32) for _ in range(12)))
engine = stepgraph.Engine(
    model, loss=lambda model, x: model(x).square().mean(),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), memory=sys.argv[1], lowering="eager",
)
batch = torch.randn(2 ** 18, 32)
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + {LIMIT_MIB} * 2 ** 20,) * 2)
losses = [engine.step(batch).item() for _ in range(2)]
print("losses", *losses)
"""


def run(memory):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, memory],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def within_a_budget():
    return run(f"budget:{BUDGET_MIB}MiB")


def test_all_is_too_much():
    done = run("none")
    assert done.returncode != 0 and "losses" not in done.stdout
    assert "allocate" in done.stderr, done.stderr[-2000:]


def test_a_budget_below_the_limit_trains(within_a_budget):
    assert within_a_budget.returncode == 0, within_a_budget.stderr[-2000:]
    first, second = map(float, within_a_budget.stdout.split()[1:])
    assert second < first
