"""The function that calls pieces: its text, and how long it holds a value."""

import weakref

import pytest
import torch
from torch import nn

from stepgraph.lowering.driver import _Writer, drive
from stepgraph.lowering.handed_on import layout
from stepgraph.torch_internals.storages import reinterpret
from tests.lowering.pieces import interpreted, pieces_of
from tests.support import assert_golden_text, captured, values


class Stack(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(torch.sin(x))) * torch.cos(x)
        return x.square().mean()


def test_its_text():
    torch.manual_seed(0)
    pieces = pieces_of(captured(Stack(16), torch.randn(3, 4)))
    assert pieces is not None
    assert_golden_text(__file__, "calls_of_pieces", _Writer(pieces).text() + "\n")


def test_it_holds_a_value_as_long_as_it_is_needed():
    torch.manual_seed(0)
    model, x = Stack(16), torch.randn(3, 4)
    program = captured(model, x)
    pieces = pieces_of(program)
    held, calls = [], iter(enumerate(pieces.calls))

    def watched(body):
        run = interpreted(body)

        def call(given):
            number, this = next(calls)
            late = [node for last, node, value in held if last < number and value() is not None]
            assert not late
            results = run(given)
            for node, result in zip(this.made, results, strict=True):
                last = number if node is None else pieces.needed[node]
                held.append((last, node, weakref.ref(result)))
            return results

        return call

    given = zip(program.inputs, program.input_values, strict=True)
    run = drive(pieces, [*map(watched, pieces.bodies)])
    run([values(model, x).of(role, value) for role, value in given])
    assert len(held) > 10 and next(calls, None) is None


def views_of(make):
    """The views that a function makes of its argument, traced: (node, what it shows, the argument)."""
    x = torch.randn(4, 6)
    module = torch.fx.experimental.proxy_tensor.make_fx(make)(x)
    source, *views = (n for n in module.graph.nodes if n.op != "output")
    return views[-1], source, x


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t()[1:5, ::2].reshape(2, 2, 2).unsqueeze(1),
        lambda x: x.view(-1).expand(3, 24).select(0, 1)[5:],
        lambda x: torch.split(x, [2, 4], 1)[1].transpose(0, 1),
    ],
)
def test_a_chain_of_views_is_one_call(make):
    node, source, x = views_of(make)
    found = layout(node, source, x)
    assert found is not None
    assert torch.equal(reinterpret(x, *found), make(x))


def test_views_that_sizes_and_strides_do_not_describe_stay():
    for make in (lambda x: x.view(torch.int32), lambda x: torch.view_as_complex(x.view(12, 2))):
        assert layout(*views_of(make)) is None
    node, source, x = views_of(lambda x: x.t().reshape(24))  # copies
    assert layout(node, source, x) is None
