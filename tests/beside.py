"""Steps of an engine beside the same ones in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import stepgraph


def beside(
    make: Callable[[], nn.Module], x: torch.Tensor
) -> tuple[stepgraph.Engine, nn.Module, Callable[[int], None]]:
    """An engine, a model like its own, and what takes so many steps with both and compares their losses."""
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    twin, own = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model))
    engine = stepgraph.Engine(
        model, loss=lambda m, x: m(x), optimizer=own, plan="ddp", lowering="eager"
    )

    def steps(count: int) -> None:
        for _ in range(count):
            twin.zero_grad()
            expected = plain(x)
            expected.backward()
            twin.step()
            torch.testing.assert_close(engine.step(x), expected.detach())

    return engine, plain, steps
