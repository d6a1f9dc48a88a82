"""Under inductor what reads memory reads it before an operator writes there."""

import pytest
import torch
from torch import fx

from stepgraph.torch_internals import new_fake_mode
from stepgraph.torch_internals.inductor.whole_step import compile_with_inductor

LIBRARY = torch.library.Library("stepgraph_order", "DEF")  # noqa: TOR901  as long as the process
LIBRARY.define("add_to_(Tensor(a!)[] these, Tensor by) -> ()")
LIBRARY.impl("add_to_", lambda these, by: [one.add_(by) for one in these] and None, "CPU")
LIBRARY.impl("add_to_", lambda these, by: None, "Meta")


def add_to(call, x, y):
    call(torch.ops.stepgraph_order.add_to_.default, [x], y)


def copy_into(call, x, y):
    call(torch.ops.aten.copy_.default, x, call(torch.ops.aten.add.Tensor, x, y))


@pytest.mark.parametrize("write", [add_to, copy_into])
def test_what_is_put_off_reads_the_value_of_before(write):
    """Element-wise work on a value that is written before its own reader comes."""
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    with new_fake_mode():
        x.meta["val"], y.meta["val"] = torch.empty(4), torch.empty(4)

        def call(target, *arguments):
            node = graph.call_function(target, arguments)
            node.meta["val"] = torch.empty(4) if target._schema.returns else None
            return node

        scaled = call(torch.ops.aten.mul.Tensor, x, y)
        write(call, x, y)
        result = call(torch.ops.aten.add.Tensor, scaled, y)
        behind = call(torch.ops.aten.mul.Tensor, x, y)
    graph.output((result, behind))
    module = fx.GraphModule({}, graph)
    examples = [node.meta["val"] for node in (x, y)]
    run = compile_with_inductor(module, examples, {}, True, {})
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    result, behind = run([ones, twos])
    assert result.tolist() == [4.0] * 4  # 1 * 2 + 2
    assert behind.tolist() == [6.0] * 4  # (1 + 2) * 2
    assert ones.tolist() == [3.0] * 4
