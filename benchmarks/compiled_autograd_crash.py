"""Does torch alone crash where a backward under compiled autograd runs within another backward?

    python benchmarks/compiled_autograd_crash.py --device cuda --runs 8

Stepgraph is not imported: this says whether ``torch_internals.limits.CRASHES_ON_DEVICES`` is still needed.
A run is a process of its own: a compiled module with a graph break, whose backward another backward calls
when it is done; garbage is collected after each. Printed is how many runs died, and by which signal.
"""

import argparse
import gc
import json
import subprocess
import sys

STEPS = 8


def run(device: str) -> None:
    """One process."""
    import torch
    from torch import nn
    from torch._dynamo import compiled_autograd

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(h).sum()

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, anchor, inner):
            ctx.inner = inner
            return value.detach().clone()

        @staticmethod
        def backward(ctx, _):
            torch.autograd.Variable._execution_engine.queue_callback(ctx.inner)
            return None, torch.zeros(()), None

    def compiler(graph: torch.fx.GraphModule):
        return torch.compile(graph, backend="eager", fullgraph=True)

    compiled = torch.compile(Broken().to(device), backend="eager")
    x = torch.randn(4, 8, device=device)
    for _ in range(STEPS):
        loss = compiled(x)

        def inner(loss: torch.Tensor = loss) -> None:
            with compiled_autograd._enable(compiler, dynamic=False):
                torch.autograd.backward([loss], [torch.ones_like(loss)])

        value = loss.detach().requires_grad_()
        Outer.apply(value, torch.zeros((), requires_grad=True), inner).backward()
        gc.collect()
    print(torch.__version__)


def main() -> None:
    """Runs it several times, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run(given.device)
        return
    command = [sys.executable, "-W", "ignore", __file__, "--one", "--device", given.device]
    ended = [subprocess.run(command, capture_output=True).returncode for _ in range(given.runs)]
    died = [code for code in ended if code]
    print(
        json.dumps({"device": given.device, "runs": given.runs, "died": len(died), "codes": died})
    )


if __name__ == "__main__":
    main()
