"""What ``auto`` decides for a small step, and what the placed step costs when it is counted again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from stepgraph.capture.module import default_loss
from stepgraph.capture.step import Source
from stepgraph.cost.collectives import collective_of, collective_seconds, links
from stepgraph.cost.devices import DEVICES, Device, Link
from stepgraph.cost.work import operation_seconds
from stepgraph.pipeline import ALL_RANKS, capture_of, form, make
from stepgraph.placement.solver import automatic as solver
from stepgraph.placement.solver.choices import Solution
from stepgraph.placement.solver.optimise import Search
from stepgraph.placement.solver.problem import Model
from stepgraph.placement.solver.room import Room
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.planning.request import AUTO, StepSettings
from stepgraph.program.collectives import ON_FIRST, is_collective
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.runtime.ranks import parse_mesh
from tests.support import HOST, spec_of


def toy(name: str, flops: float, memory: float, link: float, **other: Any) -> Device:
    """A device of few numbers: FLOP/s, bytes/s of memory and of links; no floors, no overlap."""
    numbers = {
        "name": name,
        "matmul": dict.fromkeys(DEVICES["h100"].matmul, flops),
        "memory_bandwidth": memory,
        "intra": Link(0.0, link),
        "inter": Link(0.0, link),
        "kernel_seconds": 0.0,
        "half_flops": 0.0,
        "half_bytes": 0.0,
        "overlaps": False,
        "families": {},
    }
    return dataclasses.replace(DEVICES["h100"], **(numbers | other))


TOYS = {
    device.name: device
    for device in (
        toy("slow math", 1e9, 1e9, 1e12),
        toy("balanced", 1e9, 1e8, 1e9),
        toy("slow links", 1e9, 1e9, 2e8),
        toy("slow memory", 1e12, 1e8, 1e11),
    )
}


@pytest.fixture
def toys(monkeypatch):
    """The toy devices are in the table."""
    for name, device in TOYS.items():
        monkeypatch.setitem(DEVICES, name, device)
    return TOYS


@dataclass
class Planned:
    """What was asked and answered: the optimisation, its solution, the placed Program."""

    model: Model
    solution: Solution
    placed: Program
    plan: Plan
    device: Device

    @property
    def stored(self) -> dict[str, tuple]:
        """Where parameters are stored."""
        rows = zip(self.placed.inputs, self.placed.input_values, strict=True)
        return {
            role.name: value.placements for role, value in rows if type(role).__name__ == "Param"
        }


def global_step(
    model: nn.Module, batch: Any, mesh: str, optimizer: torch.optim.Optimizer | None = None
) -> Program:
    """The step before it is placed."""
    source, driver = Source(model, default_loss, spec_of(batch), optimizer), PassDriver()
    program = capture_of(source, StepSettings(), driver).step(reduces_each=False).programs["step"]
    return form(program, preset_plan(AUTO, parse_mesh(mesh)), driver)


def place(
    program: Program,
    mesh: str,
    device: Device,
    constraints: dict[str, str] | None = None,
    memory_limit: int | None = None,
    chosen: list[int] | None = None,
    memory: str = "none",
) -> Planned:
    """Places a global step; ``chosen``: so, and not as the solver would have it."""
    plan = preset_plan(
        AUTO,
        parse_mesh(mesh),
        memory=memory,
        schedule="none",
        device=device.name,
        constraints=constraints or {},
    )
    seen: list[Any] = []

    def model_of(*args: Any) -> Model:
        seen.append(Model(*args))
        return seen[-1]

    class Solved(Search):
        """The search, or what is asked for in its place."""

        def within(self, *args: Any) -> Solution:
            if chosen is None:
                seen.append(super().within(*args))
            else:
                cost = self.problem.cost(chosen)
                seen.append(Solution(chosen, cost, cost, 0))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, device.name, device)
        patch.setattr(solver, "Model", model_of)
        patch.setattr(solver, "Search", Solved)
        patch.setattr(solver, "GAP", 1e-6)
        made = make({"step": program}, plan, HOST, ALL_RANKS, room=Room(memory_limit))
    return Planned(seen[0], seen[1], made.programs["step"], made.plan, device)


def recounted(planned: Planned, update: bool = False) -> Counter[str]:
    """Seconds of a placed Program, operation by operation: by what they are spent on."""
    program, device = planned.placed, planned.device
    assert program.mesh is not None
    wiring = links(program.mesh, device)
    found: Counter[str] = Counter()
    for node in program.operations():
        if node.meta["phase"] == OPTIMIZER and not update:
            continue
        if is_collective(node):
            kind, size, dim = collective_of(node)
            found[f"{kind} {dim}"] += collective_seconds(kind, size, wiring[dim])
        elif node.target is not ON_FIRST:  # that is part of the sum which reads it
            found[str(node.target)] += operation_seconds(node, device)
    return found
