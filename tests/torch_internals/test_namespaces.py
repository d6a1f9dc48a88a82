"""Code whose module is not the one of its name trains as it does in plain PyTorch, whole or in graphs."""

import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

from tests.beside import beside

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CODE = """
RATE = 1.0
TABLE = {"shift": 0.0}
calls = 0

def helper(x):
    return x + TABLE["shift"]

def scaled(x):
    global calls
    calls += 1
    return helper(x) * RATE
"""


class Net(nn.Module):
    """Calls code that it was given."""

    def __init__(self, names, graphs):
        super().__init__()
        self.inner, self.scaled, self.graphs = nn.Linear(6, 1), names["scaled"], graphs

    def forward(self, x):
        h = self.inner(x)
        if self.graphs:
            torch._dynamo.graph_break()
        return self.scaled(h).square().mean()


@pytest.fixture(params=["of its module", "of no module", "of no name", "of another of that name"])
def names(request, monkeypatch):
    """What such code has, twice: for a twin and a model."""
    kind, made = request.param, []
    for _ in range(2):
        module = types.ModuleType(f"loaded {kind}")
        if kind == "of its module":
            monkeypatch.setitem(sys.modules, module.__name__, module)
        elif kind == "of another of that name":
            monkeypatch.setitem(sys.modules, module.__name__, types.ModuleType("other"))
        elif kind == "of no name":
            del module.__name__
        exec(compile(CODE, "loaded.py", "exec"), vars(module))
        made.append(vars(module))
    return made


@pytest.mark.parametrize("graphs", [False, True])
def test_names_are_read_and_written_where_the_code_has_them(names, graphs):
    each = iter(names)
    engine, _, steps = beside(lambda: Net(next(each), graphs), X)
    steps(4)
    for changed in (
        lambda own: own.update(RATE=0.5),
        lambda own: own["TABLE"].update(shift=1.0),
        lambda own: own.update(helper=lambda x: x * 2),
    ):
        for own in names:
            changed(own)
        steps(4)
    assert [own["calls"] for own in names] == [16, 16]
    if not graphs:
        assert engine.stats.compiles == 4
        assert "RATE == 1.0 (loaded.py:12)" in engine.stats.recompiles[0]


def test_no_name_is_left_behind(names):
    before = {*globals(), *vars(sys.modules["stepgraph.capture.loss"])}
    found = InliningInstructionTranslator.get_globals_source_and_value
    each = iter(names)
    _, _, steps = beside(lambda: Net(next(each), False), X)
    steps(2)
    assert InliningInstructionTranslator.get_globals_source_and_value is found
    assert {*globals(), *vars(sys.modules["stepgraph.capture.loss"])} <= before
