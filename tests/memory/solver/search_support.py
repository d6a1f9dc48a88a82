"""Searches over small programs, and a step tried under any decision."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgraph.capture.module import default_loss
from stepgraph.capture.step import Source
from stepgraph.cost.device import Device
from stepgraph.cost.devices import find_device
from stepgraph.memory.solver.profile import Profile
from stepgraph.memory.solver.search import Search
from stepgraph.pipeline import PLACED, capture_of, form, simulation
from stepgraph.placement import apply as placement
from stepgraph.placement.presets.named import decide_by_preset
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.planning.target import target_of
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.runtime.ranks import parse_mesh
from tests.support import spec_of, tiny_llama, token_batch

DEVICE = find_device("h100")


class Narrowing(nn.Module):
    """No two layers are alike: the whole forward is one block, and what may be kept can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)).exp())).square().mean()


def narrowing() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Narrowing(), (torch.randn(4096, 16),)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stacks(nn.Module):
    """Two kinds of blocks that repeat, one behind the other; of some of them the code recomputes all."""

    def __init__(self, own: tuple[int, ...]) -> None:
        super().__init__()
        self.own = own
        self.wide = nn.ModuleList(Layer(32) for _ in range(3))
        self.narrow = nn.ModuleList(Layer(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate([*self.wide, *self.narrow]):
            x = checkpoint(layer, x, use_reentrant=False) if number in self.own else layer(x)
        return x.square().mean()


def stacks(own: tuple[int, ...] = ()) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Stacks(own), (torch.randn(512, 8),)


def plan_on(preset: str = "zero3", mesh: str = "dp=2", **asked: Any) -> Plan:
    return preset_plan(preset, parse_mesh(mesh), device="h100", **asked)


def placed(model: nn.Module, batch: Any, plan: Plan) -> Program:
    """The step as the memory room sees it; gradients only."""
    source = Source(model, default_loss, spec_of(batch), None)
    captured = capture_of(source, plan.request.step, PassDriver()).step(False)
    program = form(captured.programs["step"], plan, PassDriver())
    where = decide_by_preset(program, plan.mesh, plan.placement)
    return placement.apply(program, where, plan.mesh, 1, PLACED, PassDriver())


@functools.cache
def llama_program(layers: int = 3, preset: str = "zero3", mesh: str = "dp=2") -> Program:
    plan = plan_on(preset, mesh)
    return placed(tiny_llama(layers, num_key_value_heads=2), token_batch(16, 16), plan)


@functools.cache
def llama_search(layers: int = 3, preset: str = "zero3", mesh: str = "dp=2") -> Search:
    return search_of(llama_program(layers, preset, mesh), plan_on(preset, mesh))


@functools.cache
def llama_search_without_host(layers: int = 3) -> Search:
    """Of a device that has no link to memory of its host."""
    return search_of(llama_program(layers), plan_on(), device=replace(DEVICE, host=None))


def search_of(
    program: Program, plan: Plan, gather_again: bool = True, device: Device = DEVICE
) -> Search:
    simulate = simulation(plan, target_of(DEVICE))
    return Search(Profile(program, gather_again, simulate, device, fused=True))
