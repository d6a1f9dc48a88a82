"""The function that calls pieces: its text, and how long it holds a value."""

import weakref

import torch
from torch import nn

from stepgraph.lowering.driver import _Writer, drive
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
    run = drive(pieces, watched)
    run([values(model, x).of(role, value) for role, value in given])
    assert len(held) > 10 and next(calls, None) is None
