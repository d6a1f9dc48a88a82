"""What a CUDA rank runs of a model with graph breaks: a line of JSON for each graph.

python -m tests.cuda_fakes.graph_by_graph LIBRARY NAME TYPE backend|engine|whole
"""

from __future__ import annotations

import json
import sys

from tests import cuda_fakes

if __name__ == "__main__":
    cuda_fakes.pretend(sys.argv[1])  # before torch is imported

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import nn

import stepgraph
import stepgraph.api.backend as backend
from stepgraph.capture.module import default_loss
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.program.program import Program
from tests.cuda_fakes.traces import WIDE, attentions, on_device
from tests.end_to_end import models
from tests.propagation import differences


class Broken(nn.Module):
    """A module behind a graph break."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


def programs(name: str, dtype: str, how: str) -> list[Program]:
    """Of one forward and backward: under the bare backend, or of an engine, its backward whole or not."""
    brought, mode = on_device(name, getattr(torch, dtype))
    loss = brought.loss or default_loss
    if name == "llama":
        for layer in brought.model.model.layers:
            layer.mlp = Broken(layer.mlp)
    else:
        brought.model.project = Broken(brought.model.project)
    if how == "backend":
        compilers: list[GraphCompiler] = []

        class Kept(GraphCompiler):
            def __call__(self, *args, **options):
                compilers.append(self)
                return super().__call__(*args, **options)

        backend.GraphCompiler = Kept
        compiled = torch.compile(brought.model, backend="stepgraph", options={"lowering": "eager"})
        with mode:
            loss(compiled, brought.batch).backward()
        return [program for compiler in compilers for program in compiler.programs]
    engine = stepgraph.Engine(brought.model, loss=brought.loss, plan="zero3", lowering="eager")
    engine.compile(backend="eager", compiled_autograd=how == "whole")
    with mode:
        engine.backward(engine(brought.batch))
    return list(engine.programs.values())


if __name__ == "__main__":
    proxy_tensor.CONSTANT_NUMEL_LIMIT = 0
    models.WIDTH = WIDE
    for program in programs(*sys.argv[2:]):
        found = {"differences": differences(program, "cuda")}
        print(json.dumps({**found, "attentions": attentions(program.graph)}))
