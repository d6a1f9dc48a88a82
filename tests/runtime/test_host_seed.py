"""Kernels that draw by themselves are keyed by a number on the host, another one each step."""

import torch

import stepgraph
from stepgraph import torch_internals
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.names import FORWARD
from stepgraph.program.randomness import host_seed
from tests.support import adamw, mlp, regression_batch


def test_the_number_is_on_the_host_and_changes_with_each_step():
    model = mlp()
    engine = stepgraph.Engine(
        model, loss=lambda m, b: m(*b), optimizer=adamw(model), lowering="eager"
    )
    engine.step(regression_batch())
    program = engine.programs["step"].copy()
    host = torch_internals.host_device()
    Builder(program, FORWARD).input(roles.HostSeed(), (), torch.int64, host)
    state = engine._state
    state.prepare(program, None, None)
    number = state.tensors[roles.HostSeed()]
    assert number.device == host and number.dim() == 0
    seen = []
    for seed, step, micro_batch in ((0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1), (-1, 2**40, 0)):
        state.seed_random_operations(seed, step, micro_batch)
        seen.append(number.item())
        assert seen[-1] == host_seed(seed, step, micro_batch) >= 0
    assert len(set(seen)) == len(seen)
