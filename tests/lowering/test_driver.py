"""The function that calls pieces: its text, and how long it holds a value."""

import weakref

import torch
from torch import fx, nn

from stepgraph import torch_internals
from stepgraph.lowering.bodies import in_pieces
from stepgraph.lowering.driver import _Writer, drive
from stepgraph.program import roles
from stepgraph.program.metadata import set_meta
from stepgraph.program.program import FORWARD, Program, Value
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


def sending(blocks):
    """Blocks that each send a value, and wait for that of the block before."""
    graph, example = fx.Graph(), torch.empty(4, device="meta")
    x = h = graph.placeholder("x")
    set_meta(x, {"val": example, "name": "x"})

    def operation(target, *args):
        node = graph.call_function(target, args)
        set_meta(node, {"val": example, "phase": FORWARD, "module": "", "name": node.name})
        return node

    before = None
    for _ in range(blocks):
        for _ in range(30):
            h = operation(torch.ops.aten.sin.default, h)
        sent = operation(torch_internals.ALL_REDUCE, h, "sum", "0")
        h = operation(torch.ops.aten.cos.default, h)
        if before is not None:
            h = operation(torch.ops.aten.add.Tensor, h, operation(torch_internals.WAIT, before))
        before = sent
    graph.output((operation(torch_internals.WAIT, before),))
    module = fx.GraphModule(nn.Module(), graph)
    value = Value((4,), torch.float32)
    return Program("sending", module, [roles.UserInput(0, "x")], [roles.Loss()], [value], [value])


def test_what_is_on_its_way_is_kept_until_it_has_come():
    pieces = in_pieces(sending(10))
    assert pieces is not None
    for number, call in enumerate(pieces.calls):
        for node in [node for node in call.made if node is not None]:
            if node.target is torch_internals.ALL_REDUCE:
                (source,), (wait,) = node.all_input_nodes, node.users
                assert source in call.made
                assert pieces.needed[source] >= pieces.piece_of[wait] > number
