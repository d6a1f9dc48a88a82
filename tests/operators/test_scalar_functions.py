"""scalar_functions: a function as text is the function, and the text says where tensors are read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.operators.scalar_functions import (
    function_of,
    is_read_once,
    looked_up_by,
    subscript,
    text_of,
)

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
NAMES = ("score", "b", "h", "q", "k")
POSITIONS = [torch.tensor(n) for n in (1, 1, 0, 1)]


def written(function, *tensors):
    return text_of(make_fx(function)(torch.tensor(0.5), *POSITIONS, *tensors).graph, NAMES)


def look(tensor, *at):
    return aten.index.Tensor(tensor, list(at))


TABLE, SLOPES = torch.randn(2, 5), torch.randn(4)


def test_it_reads_as_python():
    text = written(lambda s, b, h, q, k, t: torch.tanh(s / 2) + look(t, b, k), TABLE)
    assert text == (
        "def f(score, b, h, q, k, t0): v0 = aten.div.Tensor(score, 2); v1 = aten.tanh.default(v0); "
        "v2 = look(t0, [b, k]); v3 = aten.add.Tensor(v1, v2); return v3"
    )
    expected = math.tanh(0.25) + TABLE[1, 1]
    for how in (aten.index.Tensor, subscript):
        torch.testing.assert_close(
            function_of(text, CPU, how)(torch.tensor(0.5), *POSITIONS, TABLE), expected
        )


def test_what_it_makes_is_where_it_is_asked_for():
    text = written(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf))
    assert "device=device(type='cpu')" in text and "-inf" in text
    assert function_of(text, CPU)(torch.tensor(0.5), *POSITIONS) == -math.inf  # the key is later
    there = [torch.tensor(1.0, device=META)] * 5
    assert function_of(text, META)(*there).device == META


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + torch.rand(()),
        lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0])[0],
        lambda s, b, h, q, k, t: s + aten.index.Tensor(t, [None, k]),
        lambda s, b, h, q, k: (s, s),
    ],
    ids=["draws", "holds a tensor", "a row of a table", "two results"],
)
def test_what_is_not_made_of_its_arguments_has_no_text(function):
    tensors = [TABLE] if function.__code__.co_argcount == 6 else []
    assert written(function, *tensors) is None


@pytest.mark.parametrize(
    ("function", "tensors", "rows", "heads"),
    [
        (lambda s, b, h, q, k: s * 2, (), {}, {}),
        (lambda s, b, h, q, k, t: s + look(t, h), (SLOPES,), {}, {"t0": 0}),
        (lambda s, b, h, q, k, t: s + look(t, b, h), (TABLE,), {"t0": 0}, {"t0": 1}),
        (lambda s, b, h, q, k, t: s + look(t, q, h), (TABLE.T,), {}, {"t0": 1}),
        (lambda s, b, h, q, k, t: s + look(t, b, q) * look(t, b, k), (TABLE,), {"t0": 0}, {}),
        (lambda s, b, h, q, k, t, u: look(u, look(t, h).abs().long()), (SLOPES, TABLE[0]), {}, {"t0": 0}),
        (lambda s, b, h, q, k, t: s + look(t, b, q) * look(t, h, k), (TABLE,), None, None),
        (lambda s, b, h, q, k, t: s + look(t, h) + look(t, k), (SLOPES,), {}, None),
        (lambda s, b, h, q, k, t: s + look(t, h, h), (TABLE,), {}, None),
        (lambda s, b, h, q, k, t: s + look(t, h) * t.sum(), (SLOPES,), {}, None),
        (lambda s, b, h, q, k, t: s + look(t * 2, h), (SLOPES,), {}, None),
        (lambda s, b, h, q, k: s + h, (), {}, None),
        (lambda s, b, h, q, k, t: s + look(t, h - 1) + b, (SLOPES,), None, None),
    ],
)  # fmt: skip
def test_where_rows_and_heads_are_counted(function, tensors, rows, heads):
    text = written(function, *tensors)
    assert looked_up_by(text, "b") == rows
    assert looked_up_by(text, "h") == heads


@pytest.mark.parametrize(
    ("function", "once"),
    [
        (lambda s, b, h, q, k, t: s + look(t, b, k), True),
        (lambda s, b, h, q, k, t: s + look(t, b, k) + look(t, b, q), False),
        (lambda s, b, h, q, k, t: s + look(t, b).sum(), False),
        (lambda s, b, h, q, k, t: s + t.sum(), False),
    ],
)
def test_what_is_read_once(function, once):
    assert is_read_once(written(function, TABLE), "t0", 2) == once


# A small grammar: leaves, and what is made of smaller ones.
LEAVES = {
    "score": lambda s, b, h, q, k, t, u: s,
    "distance": lambda s, b, h, q, k, t, u: q - k,
    "head": lambda s, b, h, q, k, t, u: h,
    "slope": lambda s, b, h, q, k, t, u: look(u, h),
    "table": lambda s, b, h, q, k, t, u: look(t, b, k),
    "number": lambda s, b, h, q, k, t, u: s * 0 + 0.5,
}


def combined(parts):
    def one(f):
        return st.sampled_from(
            [lambda *a: torch.tanh(f(*a)), lambda *a: f(*a) / 2, lambda *a: abs(f(*a))]
        )

    def two(pair):
        f, g = pair
        return st.sampled_from(
            [
                lambda *a: f(*a) + g(*a),
                lambda *a: f(*a) * g(*a),
                lambda *a: torch.where(a[3] >= a[4], f(*a), g(*a)),
                lambda *a: torch.maximum(f(*a) * 1.0, g(*a) * 1.0),
            ]
        )

    return parts.flatmap(one) | st.tuples(parts, parts).flatmap(two)


FUNCTIONS = st.recursive(st.sampled_from(list(LEAVES.values())), combined, max_leaves=6)


@settings(deadline=None)
@given(FUNCTIONS)
def test_any_functions_text_is_the_function(function):
    def score(*arguments):
        return function(*arguments) * 1.0

    arguments = (torch.tensor(0.5), *POSITIONS, TABLE, SLOPES)
    text = written(score, TABLE, SLOPES)
    assert text is not None and text == written(score, TABLE, SLOPES)
    torch.testing.assert_close(function_of(text, CPU)(*arguments), score(*arguments))
