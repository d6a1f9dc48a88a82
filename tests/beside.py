"""Steps of an engine beside the same ones in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import stepgraph


def beside(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    loss: Callable[..., torch.Tensor] = nn.Module.__call__,
    lr: float = 0.01,
) -> tuple[stepgraph.Engine, nn.Module, Callable[[int], None]]:
    """An engine, a model like its own, and what takes so many steps with both and compares their losses.

    Args:
        loss: of the model in plain PyTorch.
    """
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    twin, own = (torch.optim.SGD(m.parameters(), lr=lr) for m in (plain, model))
    engine = stepgraph.Engine(
        model, loss=lambda m, x: m(x), optimizer=own, plan="ddp", lowering="eager"
    )

    def steps(count: int) -> None:
        for _ in range(count):
            twin.zero_grad()
            expected = loss(plain, x)
            expected.backward()
            twin.step()
            torch.testing.assert_close(engine.step(x), expected.detach())

    return engine, plain, steps
