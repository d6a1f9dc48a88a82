"""Pieces that are run operator by operator: the same results in fewer calls."""

import weakref

import pytest
import torch
from torch import fx

from stepgraph.lowering.as_it_is import _show_at_once, as_it_is
from stepgraph.lowering.bodies import Body
from stepgraph.program.metadata import set_meta
from stepgraph.torch_internals.storages import assert_layout, reinterpret

aten = torch.ops.aten


def body_of(make, *values):
    """A body of what ``make`` does with values, traced; every result of it is handed on."""
    graph = fx.Graph()
    nodes = []
    for i, value in enumerate(values):
        nodes.append(graph.placeholder(f"input_{i}"))
        set_meta(nodes[-1], {"val": value})

    def emit(target, *args):
        node = graph.call_function(target, args)
        shown = fx.map_arg(args, lambda n: n.meta["val"])
        set_meta(node, {"val": target(*shown)})
        return node

    graph.output(tuple(make(emit, *nodes)))
    return Body(torch.nn.Module(), graph, plain=True)


def calls(body):
    graph = body.module().graph
    _show_at_once(graph)
    return [node.target for node in graph.nodes if node.op == "call_function"]


def gradient_into_a_bucket(emit, gradient, other):
    twice = emit(aten.t.default, emit(aten.t.default, gradient))
    flat = emit(aten.reshape.default, twice, [-1])
    return [emit(aten.cat.default, [flat, emit(aten.reshape.default, other, [-1])])]


def parts_of_a_bucket(emit, bucket):
    rows = emit(aten.reshape.default, bucket, [2, -1])
    parts = [emit(aten.slice.Tensor, rows, 1, start, start + 3) for start in (0, 3)]
    return [emit(aten.neg.default, emit(aten.reshape.default, part, [6])) for part in parts]


def one_shown_as_it_lies(emit, x):
    return [emit(aten.neg.default, emit(aten.t.default, emit(aten.t.default, x)))]


def cut_and_read_twice(emit, x):
    cut = emit(aten.slice.Tensor, x, 0, 1, 3)
    return [emit(aten.neg.default, cut), emit(aten.abs.default, emit(aten.t.default, cut))]


def cut_behind_a_copy(emit, x):
    copied = emit(aten.reshape.default, emit(aten.t.default, x), [-1])
    return [emit(aten.neg.default, emit(aten.slice.Tensor, copied, 0, 1, 5))]


CASES = [
    (cut_behind_a_copy, (torch.randn(4, 3),)),
    (gradient_into_a_bucket, (torch.randn(4, 3), torch.randn(2, 2))),
    (gradient_into_a_bucket, (torch.randn(3, 4).t(), torch.randn(2, 2))),
    (parts_of_a_bucket, (torch.randn(12),)),
    (one_shown_as_it_lies, (torch.randn(4, 3),)),
    (cut_and_read_twice, (torch.randn(4, 3),)),
    (cut_and_read_twice, (torch.randn(3, 4).t(),)),
]


@pytest.mark.parametrize(("make", "given"), CASES)
def test_results_are_those_of_the_operators(make, given):
    body = body_of(make, *given)
    expected = body.module()(*given)
    values = list(given)
    found = as_it_is(body_of(make, *given))(values)
    assert values == []
    assert all(map(torch.equal, found, expected))


def test_what_was_read_last_is_free_before_the_end():
    seen, alive = [], []

    def look(value):
        alive.extend(given() is not None for given in seen)
        return value + 0

    def twice(emit, x):
        return [emit(look, emit(aten.neg.default, emit(look, x)))]

    run = as_it_is(body_of(twice, torch.zeros(2)))
    values = [torch.zeros(2)]
    seen.append(weakref.ref(values[0]))
    run(values)
    assert alive == [True, False]


def test_what_lies_as_it_is_shown_is_not_shown_again():
    assert calls(body_of(one_shown_as_it_lies, torch.randn(4, 3))) == [
        assert_layout,
        aten.neg.default,
    ]


def test_a_chain_is_one_call():
    assert calls(body_of(cut_and_read_twice, torch.randn(4, 3))) == [
        assert_layout,
        reinterpret,
        aten.neg.default,
        reinterpret,
        aten.abs.default,
    ]


def test_another_layout_than_was_planned_is_an_error():
    run = as_it_is(body_of(cut_and_read_twice, torch.randn(4, 3)))
    with pytest.raises(AssertionError):
        run([torch.randn(3, 4).t()])
