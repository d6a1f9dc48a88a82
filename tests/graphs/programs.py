"""Programs on CUDA tensors that are not there, traced from functions of fake ones."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stepgraph.api.plan import public
from stepgraph.lowering.graphs.obstacles import find_obstacles
from stepgraph.lowering.record import Obstacle
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.target import Target
from stepgraph.program import roles
from stepgraph.program.metadata import set_meta
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, Program, Value
from stepgraph.runtime.ranks import parse_mesh

CUDA = Target("cuda", 2, True, 2**20, graphs=True)


def traced(function: Callable, *shapes: tuple[int, ...], sizes_known: bool = True) -> Program:
    """The Program of a function of float32 tensors of a CUDA device."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        given = [torch.empty(shape, device="cuda") for shape in shapes]
    kind = "real" if sizes_known else "symbolic"
    module = make_fx(function, tracing_mode=kind, _allow_non_fake_inputs=True)(*given)
    return program_of(module)


def program_of(module: fx.GraphModule) -> Program:
    """A graph as a Program: its inputs are of the batch, its results of a user."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            set_meta(node, {"val": value, "phase": FORWARD, "module": "net", "source": "net.py:1"})
        else:
            set_meta(node, {"val": value, "name": node.name})
    output = module.graph.output_node()
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    output.args = (tuple(results),)
    name_operations(module.graph)
    placeholders = module.graph.find_nodes(op="placeholder")
    return Program(
        "step",
        module,
        [roles.UserInput(i, node.name) for i, node in enumerate(placeholders)],
        [roles.UserOutput(i) for i, _ in enumerate(results)],
        [*map(Value.of, placeholders)],
        [*map(Value.of, results)],
    )


def named(function: Callable, *shapes: tuple[int, ...], **how) -> list[str]:
    """The obstacles in a function, as messages."""
    return shown(find_obstacles(traced(function, *shapes, **how), CUDA))


def shown(obstacles: list[Obstacle]) -> list[str]:
    """Node, module and message, the place on a line of its own, without its number."""
    lines = [f"{o.node} [{o.module}] {o}" if o.node else str(o) for o in obstacles]
    lines = [re.sub(r"([^\s(]*/)?(\w+\.py):\d+", r"\2", line) for line in lines]
    return [re.sub(r" \((?=[^()]*\.py)", "\n(", line) for line in lines]


class Net(torch.nn.Module):
    """A layer, and what a test does with its result and the batch."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layer, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), x).square().mean()


def planned(function: Callable) -> list[str]:
    """The obstacles of a whole step, for an H100 that is not there."""
    plan = public(preset_plan("ddp", parse_mesh("dp=1"), device="h100"))
    found = plan.obstacles(
        Net(function), example=torch.zeros(4, 4), loss=lambda model, batch: model(batch)
    )
    return shown(found)
