"""Where there is no CUDA device: an error that says what to ask for; nothing of CUDA is touched."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import LoweringError
from tests.support import adamw, mlp, regression_batch

MESSAGE = """\
lowering='cuda_graph' cannot run here
  why: what a device of type 'cpu' runs is not captured: that takes a CUDA device
  what to do: lowering='inductor' is the next best
  see: docs/errors.md#loweringerror"""


def test_an_engine_says_so_before_anything_is_changed():
    model = mlp()
    with pytest.raises(LoweringError) as error:
        stepgraph.Engine(model, optimizer=adamw(model), lowering="cuda_graph")
    assert str(error.value) == MESSAGE
    assert type(model.first.weight) is nn.Parameter


def test_so_do_the_split_use_parallelize_and_the_backend():
    model = mlp()
    engine = stepgraph.Engine(model, optimizer=adamw(model), lowering="eager")
    with pytest.raises(LoweringError, match="next best"):
        engine.compile(backend="cuda_graph")
    with pytest.raises(LoweringError, match="next best"):
        stepgraph.parallelize(mlp(), example=regression_batch(), lowering="cuda_graph")
    compiled = torch.compile(mlp(), backend="stepgraph", options={"lowering": "cuda_graph"})
    with pytest.raises(Exception, match="next best"):
        compiled(*regression_batch())


def test_the_plan_of_an_engine_on_the_host_says_so():
    model = mlp()
    engine = stepgraph.Engine(model, optimizer=adamw(model), lowering="eager")
    engine.step(regression_batch())
    (found,) = engine.plan.obstacles(mlp(), example=regression_batch())
    assert str(found) == (
        "what a device of type 'cpu' runs is not captured: that takes a CUDA device: "
        "lowering='inductor' is the next best"
    )


def test_importing_it_and_making_an_engine_touch_no_cuda():
    program = """
import json, sys
import torch
def refuse(*a, **k): raise AssertionError("CUDA is touched")
torch.cuda._lazy_init = refuse
torch.cuda.graph_pool_handle = torch.cuda.Stream = torch.cuda.CUDAGraph = refuse
import stepgraph
from tests.support import adamw, mlp
model = mlp()
stepgraph.Engine(model, optimizer=adamw(model), lowering="eager")
print(json.dumps(torch.cuda.is_initialized()))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) is False
