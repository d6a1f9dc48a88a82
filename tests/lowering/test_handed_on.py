"""What pieces hand on, and what is computed anew: of programs that no model here has."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from stepgraph import torch_internals
from stepgraph.lowering.bodies import in_pieces
from stepgraph.lowering.driver import drive
from stepgraph.lowering.handed_on import computed_anew, floats
from stepgraph.program import roles
from stepgraph.program.metadata import set_meta
from stepgraph.program.program import FORWARD, Program, Value
from stepgraph.program.randomness import RANDOM, seed_words
from tests.lowering.pieces import interpreted

aten = torch.ops.aten
FOUR = torch.empty(4)
BITS = torch.empty(4, dtype=torch.int64)


class Written:
    """A Program written by hand, operation by operation."""

    def __init__(self, *inputs: str) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.named(self.graph.placeholder(name), FOUR) for name in inputs]

    def named(self, node: fx.Node, value: Any) -> fx.Node:
        set_meta(node, {"val": value, "name": node.name, "phase": FORWARD, "module": ""})
        return node

    def __call__(self, target: Any, *args: Any, value: Any = FOUR, **kwargs: Any) -> fx.Node:
        return self.named(self.graph.call_function(target, args, kwargs), value)

    def sums(self, h: fx.Node, count: int = 50) -> fx.Node:
        for _ in range(count):
            h = self(aten.cumsum.default, h, 0)
        return h

    def finish(self, result: fx.Node) -> Program:
        self.graph.output((result,))
        count = len(self.inputs)
        values = [Value((4,), torch.float32)]
        inputs = [roles.UserInput(i, str(i)) for i in range(count)]
        module = fx.GraphModule(nn.Module(), self.graph)
        return Program("by hand", module, inputs, [roles.Loss()], values * count, values)


SCATTERS: tuple = (torch_internals.REDUCE_SCATTER, "sum", 1, "0")
REDUCES: tuple = (torch_internals.ALL_REDUCE, "sum", "0")


def sending(blocks: int, made: Any = aten.cumsum.default, send: tuple = SCATTERS) -> Program:
    """Blocks that each send a value, and wait for that of the block before."""
    write = Written("x")
    h, before = write.inputs[0], None
    for _ in range(blocks):
        h = write.sums(h, 30)
        args = (h, 0) if made is aten.cumsum.default else (h,)
        sent = write(send[0], write(made, *args), *send[1:])
        h = write(aten.cos.default, h)
        if before is not None:
            h = write(aten.add.Tensor, h, write(torch_internals.WAIT, before))
        before = sent
    return write.finish(write(torch_internals.WAIT, before))


def test_what_is_on_its_way_is_kept_until_it_has_come():
    pieces = in_pieces(sending(10))
    assert pieces is not None
    crossing = 0
    for number, call in enumerate(pieces.calls):
        for node in [node for node in call.made if node is not None]:
            if node.target is torch_internals.REDUCE_SCATTER:
                (source,), (wait,) = node.all_input_nodes, node.users
                assert source in call.made
                assert pieces.needed[source] >= pieces.piece_of[wait] > number
                crossing += 1
    assert crossing


def test_what_an_all_reduce_copied_is_not_kept_until_it_has_come():
    pieces = in_pieces(sending(10, send=REDUCES))
    assert pieces is not None
    crossing = 0
    for number, call in enumerate(pieces.calls):
        for node in [node for node in call.made if node is not None]:
            if node.target is torch_internals.ALL_REDUCE:
                (source,), (wait,) = node.all_input_nodes, node.users
                assert source not in call.made and pieces.needed.get(source, number) <= number
                assert pieces.needed[node] >= pieces.piece_of[wait] > number
                crossing += 1
    assert crossing


MADE = [
    (aten.mm.default, lambda h: (h, h), True),
    (aten.mul.Tensor, lambda h: (h, h), False),
    (aten.cat.default, lambda h: ([h, h],), True),
    (aten.cat.default, lambda h: ([h],), False),
]


@pytest.mark.parametrize("made, arguments, in_place", MADE)
def test_a_sum_is_written_over_what_was_made_for_it_alone(made, arguments, in_place):
    """A product with ones may be handed on as the very memory of its factor, and so may a cat of one."""
    write = Written("x")
    h = write.inputs[0]
    for _ in range(8):
        h = write(aten.cos.default, write.sums(h, 30))
    summed = write(torch_internals.ALL_REDUCE, write(made, *arguments(h)), "sum", "0")
    pieces = in_pieces(write.finish(write(torch_internals.WAIT, summed)))
    assert pieces is not None
    plain = [call.body for call in pieces.calls if call.body.plain]
    targets = [node.target for body in plain for node in body.graph.nodes]
    assert (torch_internals.ALL_REDUCE_INTO in targets) is in_place


def test_what_is_sent_is_not_computed_anew_by_who_sends_it():
    write = Written("x")
    h = write.sums(write.inputs[0], 2)
    sent = write(aten.tanh.default, h)
    other = write(aten.cumsum.default, h, 0)
    start = write(torch_internals.REDUCE_SCATTER, sent, "sum", 1, "0")
    read = write(aten.add.Tensor, other, h)
    wait = write(torch_internals.WAIT, start)
    program = write.finish(write(aten.add.Tensor, read, wait))
    operations = [node for node in program.operations() if not floats(node)]
    piece_of = {n: 0 for n in operations[:3]} | {n: 1 for n in operations[3:5]}
    piece_of |= {n: 2 for n in operations[5:]}
    assert not computed_anew(operations, piece_of)


def test_arithmetic_on_what_is_written_later_is_not_computed_behind_it():
    write = Written("x", "w", "shard")
    h, w, shard = write.inputs
    early = write(aten.tanh.default, w)
    for block in range(12):
        h = write(aten.mul.Tensor, write.sums(h), w)
        if block == 11:
            gather = write(torch_internals.ALL_GATHER_INTO, shard, 2, "0", out=w)
            write(torch_internals.WAIT, gather)
        h = write(aten.add.Tensor, h, early)
    pieces = in_pieces(write.finish(h))
    assert pieces is not None
    assert not any(node.target is aten.tanh.default for node in pieces.calls[-1].body.graph.nodes)


def test_draws_of_one_piece_are_told_apart_as_in_the_program():
    write = Written("seed", "x")
    seed, h = write.inputs
    set_meta(seed, {"val": torch.empty(3, dtype=torch.int64), "name": "seed"})
    for block in range(8):
        first, second = 10 * block + 1, 10 * block + 2
        for number in (first, second, first if block % 2 else second):
            bits = write(RANDOM, seed, "bits", number, [4], [4], [0], [], "", value=BITS)
            h = write(aten.remainder.Scalar, write.sums(h, 16), 7.0)
            h = write(aten.add.Tensor, h, write(aten.remainder.Scalar, bits, 97, value=BITS))
    program = write.finish(h)
    pieces = in_pieces(program)
    assert pieces is not None and len(pieces.calls) > len(pieces.bodies)
    given = [seed_words(3, 1, 0), torch.arange(4.0)]
    torch.testing.assert_close(
        drive(pieces, [*map(interpreted, pieces.bodies)])(given), [*program.module(*given)]
    )


class Gated(nn.Module):
    """What the first operation makes every block can make itself: nothing of it is handed on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        gate = torch.sigmoid(x)
        h = x
        for layer in self.layers:
            h = torch.softmax(layer(nn.functional.layer_norm(h, (8,))), -1) * x + gate
        return h


@pytest.mark.slow
def test_a_piece_that_hands_on_nothing_compiles():
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="stepgraph", options={"lowering": "inductor"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
