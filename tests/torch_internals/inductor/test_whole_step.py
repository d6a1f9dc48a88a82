"""Inductor's compiler on a graph that writes in place."""

import torch
from torch import fx
from torch._inductor.lowering import lowerings
from torch._inductor.utils import fresh_cache

from stepgraph.torch_internals.inductor.whole_step import compile_with_inductor

aten = torch.ops.aten


def test_what_inductor_does_not_know_is_called_where_the_environment_says_ci(monkeypatch):
    """There it refuses an operator that torch could decompose, and nobody decomposes a write here."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.delitem(lowerings, aten.addmm_.default, raising=False)
    graph = fx.Graph()
    total, rows, columns = (graph.placeholder(name) for name in ("total", "rows", "columns"))
    graph.output((graph.call_function(aten.addmm_.default, (total, rows, columns)),))
    examples = [torch.ones(4, 6), torch.randn(4, 3), torch.randn(3, 6)]
    expected = torch.addmm(*examples)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(example) for example in examples]
    for node, fake in zip(graph.nodes, [*fakes, fakes[0]], strict=False):
        node.meta["val"] = fake
    with fresh_cache():
        run = compile_with_inductor(fx.GraphModule({}, graph), fakes, {}, True, {})
    (found,) = run(list(examples))
    assert found is examples[0]
    torch.testing.assert_close(found, expected)
