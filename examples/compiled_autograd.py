"""A model with a graph break and a hook, trained on sharded parameters, its backward one compiled graph.

    python examples/compiled_autograd.py                    # one process
    torchrun --nproc-per-node 2 examples/compiled_autograd.py

``docs/graph_breaks.md`` tells what happens here.
"""

import os

import torch
from torch import nn

import stepgraph


class Branching(nn.Module):
    """Between its layers Python looks at the data: no compiler captures that whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two activations, by the mean of what comes in."""
        hidden = self.first(x)
        hidden = hidden.relu() if hidden.mean() > 0 else hidden.tanh()
        return self.second(hidden)


def main() -> None:
    """Ten steps."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Branching()
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    engine = stepgraph.Engine(
        model,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        plan="zero3",
        lowering="eager",  # "inductor" compiles for minutes the first time, and then runs faster
    )
    engine.compile("eager", compiled_autograd=True)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 32, generator=generator), torch.randn(64, 8, generator=generator)
    batch = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    for step in range(10):
        loss = engine(batch)
        loss.backward()  # one graph: both layers' backwards, the hook, the reduce-scatters
        engine.optimizer_step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if rank == 0:
        print(engine.report())


if __name__ == "__main__":
    main()
