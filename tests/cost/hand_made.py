"""Programs written by hand: a few operations on shapes, for what the cost model says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.device import Device, Link
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.layout import MeshShape
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, Program, Value

aten = torch.ops.aten


def round_device(**changes: Any) -> Device:
    """A device of round numbers: 1 TFLOP/s, 1 GB/s, 1 us a message, 100 MB/s a link; no ramps."""
    rates = {torch.float32: 1e12, torch.bfloat16: 4e12}
    settings: dict[str, Any] = {
        "name": "round",
        "matmul": rates,
        "peak": {dtype: 2 * rate for dtype, rate in rates.items()},
        "memory_bandwidth": 1e9,
        "capacity": 10**9,
        "intra": Link(1e-6, 1e8),
        "inter": Link(1e-5, 1e7),
        "ranks_per_node": 8,
        "kernel_seconds": 0.0,
        "half_flops": 0.0,
        "half_bytes": 0.0,
    }
    return Device(**(settings | changes))


class Written:
    """Builds a Program operation by operation.

    ``inputs``: name -> shape, float32 parameters; others are given with ``like``.
    """

    def __init__(self, inputs: dict[str, Any], mesh: str = "", phase: str = FORWARD) -> None:
        graph = fx.Graph()
        mode = torch_internals.new_fake_mode()
        made: list[Value] = []
        self.nodes: dict[str, fx.Node] = {}
        for name, given in inputs.items():
            node = graph.placeholder(name)
            with mode:
                value = given if callable(given) else (lambda shape=given: torch.empty(shape))
                node.meta = {"val": value(), "name": name}
            made.append(Value(tuple(node.meta["val"].shape), node.meta["val"].dtype))
            self.nodes[name] = node
        graph.output(())
        dims = tuple(
            (part.split("=")[0], int(part.split("=")[1])) for part in mesh.split(",") if part
        )
        self.program = Program(
            "step",
            fx.GraphModule({}, graph),
            [roles.Param(name) for name in inputs],
            [],
            made,
            [],
            MeshShape(dims) if dims else None,
        )
        self.phase = phase

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def __call__(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return Builder(self.program, self.phase)(target, *args, **kwargs)

    def returning(self, *results: fx.Node) -> Program:
        """The Program, with these results."""
        self.program.graph.output_node().args = (tuple(results),)
        self.program.outputs = [roles.UserOutput(i) for i in range(len(results))]
        self.program.output_values = [
            Value(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in results
        ]
        name_operations(self.program.graph)
        return self.program

    def gather(self, node: fx.Node, ranks: int, dim: str = "dp") -> fx.Node:
        """An all-gather and its wait."""
        return self(torch_internals.WAIT, self(torch_internals.ALL_GATHER, node, ranks, dim))
