"""How what dynamo compiles for us is guarded."""

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo.guards import CheckFunctionManager

import stepgraph
from stepgraph.torch_internals.graphs import compiled_autograd_problem
from stepgraph.torch_internals.limits import CRASHES_ON_DEVICES, SAFE_GUARDS


@pytest.mark.skipif(not SAFE_GUARDS, reason="this torch has no guards that remember dictionaries")
def test_no_guard_remembers_addresses(monkeypatch):
    seen, made = [], CheckFunctionManager.__init__

    def init(*args, **kwargs):
        seen.append({name: getattr(dynamo_config, name) for name in SAFE_GUARDS})
        made(*args, **kwargs)

    monkeypatch.setattr(CheckFunctionManager, "__init__", init)
    model = nn.Linear(4, 4)
    engine = stepgraph.Engine(
        model, loss=lambda m, x: m(x).sum(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lowering="eager",
    )  # fmt: skip
    with dynamo_config.patch(dict.fromkeys(SAFE_GUARDS, True)):  # as in torch before 2.12
        engine.step(torch.ones(2, 4))
    assert seen and seen == [SAFE_GUARDS] * len(seen)


def test_compiled_autograd_is_refused_where_it_crashes():
    assert compiled_autograd_problem("cpu") is None
    assert (compiled_autograd_problem("cuda") is None) == (not CRASHES_ON_DEVICES)
