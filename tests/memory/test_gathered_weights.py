"""What was gathered of a parameter is never kept for the backward by accident, nor a view or cast of it."""

import pytest
import torch

import stepgraph
from stepgraph import torch_internals
from tests.gathered import gathered_and_saved, without_the_chain
from tests.sampling import sampled
from tests.support import tiny_llama, token_batch

CELLS = [
    ("dp=2", "zero3", torch.bfloat16), ("dp=2", "zero3", None),
    ("dp=2,tp=2", "tp+zero3", None), ("dp=2,tp=2", "tp+zero3", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "placement", "dtype"), sampled(CELLS, every=4))
def test_no_gathered_weight_is_saved(mesh, placement, dtype):
    model, batch = tiny_llama(), token_batch(8)
    how = {"placement": placement, "memory": "none", "compute_dtype": dtype}
    plan = stepgraph.plan(model, example=batch, mesh=mesh, **how)
    step = plan.programs(model, example=batch)["step"]
    assert any(node.target is torch_internals.ALL_GATHER for node in step.operations())
    assert gathered_and_saved(step) == {}
    apart = stepgraph.plan(model, example=batch, mesh=mesh, schedule="none", **how)
    plain = without_the_chain(apart).programs(model, example=batch)["step"]
    assert len(gathered_and_saved(plain)) >= 2 * 7
