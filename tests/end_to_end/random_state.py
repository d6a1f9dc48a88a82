"""Random modules with Python state, buffers, checkpointed regions: what plain PyTorch makes of them.

Compared with plain PyTorch with and without regions: a region runs twice there, with what it changes.

A module is a list of layers, each of which may keep state in Python or in buffers, read it, change it, and
run in a checkpointed region. Between steps a script changes some of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.errors import StepgraphError

WIDTH, ROWS, STEPS = 6, 8, 4
TOLERANCE = 1e-5
OUTSIDE = torch.linspace(0.5, 1.5, WIDTH)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Scaled(nn.Module):
    """Reads a number, a flag, a list's length, a dict."""

    def __init__(self):
        super().__init__()
        self.alpha, self.flag, self.sizes, self.table = 1.5, True, [1, 2], {"shift": 0.25}

    def forward(self, x):
        x = x * self.alpha if self.flag else x - self.alpha
        return x * len(self.sizes) / 2 + self.table["shift"]


class Counting(nn.Module):
    """Counts its calls, and says so to nobody."""

    def __init__(self):
        super().__init__()
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = x.shape[0]
        return x


class Warming(nn.Module):
    """Computes with how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * min(1.0, self.calls / 2)


class InPlace(nn.Module):
    """Running statistics, written in place, and read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.25)
        self.count += 1
        return x - self.mean


class Assigned(nn.Module):
    """Running statistics that are put in the old ones' place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        out = x * self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.detach().abs().mean(0)
        return out


class Read(nn.Module):
    """A number that is read from a tensor."""

    def forward(self, x):
        return x / max(1e-3, x.detach().abs().max().item())


class FromOutside(nn.Module):
    """Reads a tensor that is nobody's."""

    def __init__(self):
        super().__init__()
        self.weights = OUTSIDE.clone()

    def forward(self, x):
        return x * self.weights


class Branch(nn.Module):
    """Branches on data: a graph break."""

    def forward(self, x):
        return x * 2 if x.mean() > 0 else x - 1


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x)


KINDS = {
    kind.__name__: kind
    for kind in (
        Linear, Scaled, Counting, Warming, InPlace, Assigned, Read, FromOutside, Branch, Norm,
    )
}  # fmt: skip
REGIONS = ("", "checkpoint", "reentrant")
CHANGES = (
    "alpha",
    "flag",
    "sizes",
    "table",
    "weights",
    "weights replaced",
    "frozen",
    "evaluated",
    "none",
)


@dataclass(frozen=True)
class Case:
    """Layers with the regions that they run in, and what a script changes after each step."""

    layers: tuple[tuple[str, str], ...]
    changes: tuple[str, ...]
    part: int


def checkpointed(region: str) -> Any:
    return functools.partial(checkpoint, use_reentrant=region == "reentrant")


class Net(nn.Module):
    def __init__(self, case: Case, regions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(KINDS[kind]() for kind, _ in case.layers)
        self.regions = [region if regions else "" for _, region in case.layers]
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for layer, region in zip(self.layers, self.regions, strict=True):
            run = checkpointed(region) if region else nn.Module.__call__
            x = run(layer, x)
        return self.last(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def change(model: Net, what: str) -> None:
    """What a script does between two steps."""
    for layer in model.layers:
        if isinstance(layer, Scaled):
            if what == "alpha":
                layer.alpha *= 0.5
            elif what == "flag":
                layer.flag = not layer.flag
            elif what == "sizes":
                layer.sizes.append(0)
            elif what == "table":
                layer.table["shift"] += 0.5
        if isinstance(layer, FromOutside):
            if what == "weights":
                layer.weights.mul_(0.5)
            elif what == "weights replaced":
                layer.weights = layer.weights + 1
    if what == "frozen":
        model.first.weight.requires_grad_(not model.first.weight.requires_grad)


def state(model: nn.Module) -> dict[str, Any]:
    """All that a step leaves: values, and numbers in Python."""
    found: dict[str, Any] = dict(model.named_buffers())
    found |= dict(model.named_parameters())
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if type(v) in (int, float, bool)}
        found |= {f"{name}:{k}": v for k, v in plain.items() if k != "training"}
    return found


def is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within what the order of sums explains."""
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return torch.allclose(found.detach(), wanted.detach(), rtol=1e-4, atol=TOLERANCE)


def is_same(found: Any, wanted: Any) -> bool:
    """A tensor, or a number in Python."""
    return is_close(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


class Twins:
    """What plain PyTorch makes of a case: without regions, and with them."""

    def __init__(self, case: Case) -> None:
        self.models = [Net(case, regions=False), Net(case)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in self.models]

    def step(self, x: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(model, x))
            losses[-1].backward()
            optimizer.step()
        return losses

    def evaluate(self, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            losses = [loss_of(model.eval(), x) for model in self.models]
        for model in self.models:
            model.train()
        return losses

    def differences(self, own: nn.Module) -> list[str]:
        """What is found under a name that neither has there."""
        found, wanted = state(own), [state(model) for model in self.models]
        return [
            f"{name}: {value} for {[twin[name] for twin in wanted]}"
            for name, value in found.items()
            if not any(is_same(value, twin[name]) for twin in wanted)
        ]


def run(case: Case, rank: int = 0, ranks: int = 1) -> tuple[str, list[str]]:
    """How a case ended, and what differs from plain PyTorch where nothing said so.

    Returns:
        ``equal``, or the name of an error of stepgraph's; and the differences.
    """
    twins, own = Twins(case), Net(case)
    engine = stepgraph.Engine(
        own, loss=loss_of, optimizer=torch.optim.SGD(own.parameters(), lr=0.05), lowering="eager",
        plan="zero3" if case.part % 2 else "ddp",
    )  # fmt: skip
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    for step in range(STEPS):
        x = batch(step)
        what = case.changes[step % len(case.changes)]
        try:
            found = [engine.step(x[rows])]
            wanted = [twins.step(x)]
            apart = twins.differences(own)
            if what == "evaluated":
                found.append(engine.evaluate(x[rows]))
                wanted.append(twins.evaluate(x))
        except StepgraphError as error:
            return type(error).__name__, []
        for value, either in zip(found, wanted, strict=True):
            if not any(is_close(value, one) for one in either):
                apart.append(f"step {step}: {value} for {either}")
        if apart:
            return "silent", apart
        for model in (own, *twins.models):
            change(model, what)
    return "equal", []


def run_part(case: Case) -> tuple[str, list[str]]:
    """A part of a parallelized module called on its own, forward and backward."""
    plain, own = Net(case, regions=False), Net(case)
    own = stepgraph.parallelize(
        own, mesh="dp=1", plan="zero3", example=(batch(0),), lowering="eager"
    )
    part = ["first", "last", *(f"layers.{i}" for i in range(len(case.layers)))]
    name = part[case.part % len(part)]
    x, twin = (batch(1).requires_grad_() for _ in range(2))
    expected = plain.get_submodule(name)(x)
    expected.sum().backward()
    try:
        found = own.get_submodule(name)(twin)
        found.sum().backward()
    except StepgraphError as error:
        return type(error).__name__, []
    wanted = state(plain)
    apart = [
        f"{n}: {v}" for n, v in state(own).items() if n in wanted and not is_same(v, wanted[n])
    ]
    if not is_close(found, expected):
        apart.append("the result")
    if not is_close(twin.grad, x.grad):
        apart.append("the input's gradient")
    for name, p in plain.named_parameters():
        q = own.get_parameter(name)
        if (p.grad is None) != (q.grad is None):
            apart.append(f"{name}: a gradient on one side")
        elif p.grad is not None and not is_close(q.grad, p.grad):
            apart.append(f"the gradient of {name}")
    return ("silent" if apart else "equal"), apart


def run_on_ranks(cases: list[Case]) -> list[tuple[str, list[str]]]:
    """The same on a rank of several, one case after the other."""
    import torch.distributed as dist

    return [run(case, dist.get_rank(), dist.get_world_size()) for case in cases]
