"""flex_attention: through the one operator, what hand-written attention gives; by torch's operator too."""

import functools
import math

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils import _pytree as pytree

from stepgraph import torch_internals
from stepgraph.capture import flex_calls
from stepgraph.capture.canonical import canonicalise
from stepgraph.cost.work import flops_of
from stepgraph.operators import flex
from stepgraph.operators.flex import FLEX, Flex
from stepgraph.torch_internals import flex as torchs
from tests.operators.test_scalar_functions import FUNCTIONS, written
from tests.sampling import sampled

# dynamo makes an instance of a class of torch's own
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 6, 16


def rand(*shape, **options):
    return torch.randn(*shape, requires_grad=True, **options)


def qkv(heads=HEADS, keys=LENGTH, width=WIDTH, **options):
    q = rand(ROWS, HEADS, LENGTH, WIDTH, **options)
    return q, rand(ROWS, heads, keys, WIDTH, **options), rand(ROWS, heads, keys, width, **options)


def calls_of(function, *inputs):
    """The function as a graph with the one operator in the place of torch's, run; and the notes on it."""
    notes = []

    def backend(graph, examples):
        notes.extend(canonicalise(graph))
        return graph

    with torchs.differentiable_on_host():
        found = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    torch._dynamo.reset()
    return found, notes


def by_hand(q, k, v, score, shown, scale=None):
    """``score`` and ``shown`` of arrays that broadcast to [rows, heads, queries, keys]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    at = [
        torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)
    ]
    scores = (q.float() @ k.float().mT) * (scale or q.shape[-1] ** -0.5)
    scores = score(scores, *at).masked_fill(~shown(*at).expand(sizes), -math.inf)
    shares = torch.softmax(scores, -1).nan_to_num(0.0)  # of a query that sees nothing: nothing
    return (shares.to(q.dtype) @ v).to(q.dtype)


def everything(b, h, q, k):
    return q + k >= 0


def causal(b, h, q, k):
    return q >= k


SLOPES, BIAS, TABLE = rand(HEADS), rand(HEADS, LENGTH, LENGTH), torch.randn(ROWS, LENGTH)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])

SCORES = {
    "as they are": lambda s, b, h, q, k: s,
    "capped": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "slopes": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "a bias": lambda s, b, h, q, k: s + BIAS[h, q, k],
    "of rows": lambda s, b, h, q, k: s * torch.exp(TABLE[b, k]),
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "by its number": lambda s, b, h, q, k: s + h + 0.5 * b,
    "the same twice": lambda s, b, h, q, k: s + SLOPES[h] - SLOPES[h] * k,
}
MASKS = {
    "all": lambda of: everything,
    "causal": lambda of: causal,
    "documents": lambda of: lambda b, h, q, k: (of[b, q] == of[b, k]) & (q >= k),
    "nothing for some": lambda of: lambda b, h, q, k: (q != 2) & (k >= 0),
    "heads apart": lambda of: lambda b, h, q, k: (h > 1) | (q >= k),
}
CASES = [(score, "causal") for score in SCORES] + [("capped", mask) for mask in MASKS]


def learned_of(score, tensors):
    used = {"slopes": [SLOPES], "the same twice": [SLOPES], "a bias": [BIAS]}.get(score, [])
    return [*tensors, *used]


def gradients(result, learned):
    weight = torch.sin(torch.arange(result.numel(), dtype=torch.float32)).view(result.shape)
    return torch.autograd.grad((result.float() * weight).sum(), learned)


@pytest.mark.parametrize(
    ("score", "mask", "grouped"),
    sampled([(*case, grouped) for case in CASES for grouped in (False, True)], every=5),
)
def test_it_is_attention_as_it_reads(score, mask, grouped):
    q, k, v = qkv(heads=2 if grouped else HEADS, width=8)
    learned = learned_of(score, (q, k, v))

    def attend(q, k, v, of):
        blocks = create_block_mask(MASKS[mask](of), ROWS, HEADS, LENGTH, LENGTH, device="cpu")
        return flex_attention(
            q, k, v, score_mod=SCORES[score], block_mask=blocks, enable_gqa=grouped
        )

    found, notes = calls_of(attend, q, k, v, DOCUMENTS)
    assert not notes
    expected = by_hand(q, k, v, SCORES[score], MASKS[mask](DOCUMENTS))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, learned), gradients(expected, learned))


# --------------------------------------------------------------------------- torch's own operator


def call(score, mask, grouped=False, keys=LENGTH):
    """A call as it is captured, on real tensors."""
    found = []

    def attend(q, k, v, of):
        blocks = create_block_mask(MASKS[mask](of), ROWS, HEADS, LENGTH, keys, device="cpu")
        return flex_attention(
            q, k, v, score_mod=SCORES[score], block_mask=blocks, enable_gqa=grouped
        )

    def seen(*arguments):
        found.append(Flex(*arguments))
        return flex_calls.attend(*arguments)

    def backend(graph, examples):
        canonicalise(graph)
        for node in graph.graph.nodes:
            node.target = seen if node.target is flex_calls.attend else node.target
        graph.recompile()
        return graph

    with torchs.differentiable_on_host():
        compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
        compiled(*qkv(heads=2 if grouped else HEADS, keys=keys), DOCUMENTS)
    torch._dynamo.reset()
    (one,) = found
    detached = [t.detach() for t in one[:3]]
    return Flex(*detached, *([t.detach() for t in x] for x in one[3:6]), *one[6:])


def close(found, expected):
    torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("score", "mask", "grouped"),
    sampled([(*case, grouped) for case in CASES for grouped in (False, True)], every=5),
)
def test_what_a_device_compiles_calls_torchs_operator_and_means_the_same(score, mask, grouped):
    """Its graph, run where the operator is plain: the kernel itself needs a device."""
    one = call(score, mask, grouped)
    learned = [0] if learned_of(score, ()) and not flex.kernel_refuses(one, [0]) else []
    tensors = flex.tensors_of(one)
    graph, _ = torchs.operator_graph(flex.flat(flex.in_kernel, one), tensors)
    assert [n.target for n in graph.graph.nodes if "flex" in str(n.target)] == [torchs.FLEX]
    expected = flex.plain_result(one)
    result, sums = graph(*tensors)
    close((result, sums), expected)
    gradient = torch.randn(result.shape)
    function = functools.partial(flex.gradients_in_kernel, learned=learned)
    graph, _ = torchs.operator_graph(flex.flat(function, one), [*tensors, result, sums, gradient])
    names = [str(n.target) for n in graph.graph.nodes if "flex" in str(n.target)]
    assert names == ["flex_attention_backward"]
    one.score_others[:] = [t.requires_grad_(i in learned) for i, t in enumerate(one.score_others)]
    found = graph(*flex.tensors_of(one), result, sums, gradient)
    close(found, flex.plain_gradients(one, gradient, learned))


@pytest.mark.parametrize("score", ["capped", "slopes"])
def test_a_device_compiles_once_for_a_call_and_its_backward(score, monkeypatch):
    """The whole operator as a device would run it, but for the compiler."""
    one = call(score, "documents", grouped=True)
    compiled = []

    def uncompiled(function, examples):
        compiled.append(function)
        graph, _ = torchs.operator_graph(function, examples)
        learns = [t.is_floating_point() for t in examples]  # what is plain asks the tensors
        return lambda tensors: graph(
            *(t.detach().requires_grad_(x) for t, x in zip(tensors, learns, strict=True))
        )

    monkeypatch.setattr(flex, "_is_host", lambda tensor: False)
    monkeypatch.setattr(torchs, "compiled", uncompiled)
    monkeypatch.setattr(flex, "_COMPILED", {})
    q, k, v = qkv(heads=2)
    learned = learned_of(score, (q, k, v))
    others = [SLOPES] if score == "slopes" else []
    expected = by_hand(q, k, v, SCORES[score], MASKS["documents"](DOCUMENTS))
    for _ in range(2):
        result, _ = FLEX(q, k, v, others, *one[4:])
        torch.testing.assert_close(result, expected)
        close(gradients(result, learned), gradients(expected, learned))
        expected = by_hand(q, k, v, SCORES[score], MASKS["documents"](DOCUMENTS))
    assert len(compiled) == 2


def test_inductor_compiles_what_a_device_calls(monkeypatch):
    """For the host there is a kernel of the forward alone, which gives the result alone."""
    from torch._inductor.fx_passes import joint_graph

    passes = joint_graph.joint_graph_passes

    def without_sums(graph):
        graph.graph.eliminate_dead_code()
        return passes(graph)

    monkeypatch.setattr(joint_graph, "joint_graph_passes", without_sums)
    one = call("slopes", "documents", grouped=True)
    tensors = flex.tensors_of(one)

    def result_alone(call):
        given = flex.torchs_call(call)
        options = given.options | {"OUTPUT_LOGSUMEXP": False, "OUTPUT_MAX": False}
        return torchs.FLEX(*given._replace(options=options)[:-1], *given.others)[:1]

    run = torchs.compiled(flex.flat(result_alone, one), tensors)
    close(run(list(tensors)), flex.plain_result(one)[:1])


# ------------------------------------------------------------------------------------- irregular


def with_sums(q, k, v):
    result, extra = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    return result + extra.lse[..., None]


def test_sums_that_nobody_reads_are_no_reason():
    q, k, v = qkv()

    def attend(q, k, v):
        result, extra = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
        extra.lse.to(torch.float64)
        return result

    found, notes = calls_of(attend, q, k, v)
    assert not notes
    close([found], [by_hand(q, k, v, SCORES["as they are"], everything)])


def test_what_is_no_such_call_is_spelt_out_and_said():
    q, k, v = qkv()
    found, notes = calls_of(with_sums, q, k, v)
    assert notes and "plain arithmetic" in notes[0]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    expected = scores.softmax(-1) @ v + scores.logsumexp(-1)[..., None]
    torch.testing.assert_close(found, expected)


def test_without_functions_it_is_plain_attention_in_any_type():
    for dtype, near in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
        q, k, v = qkv(keys=7, dtype=dtype)
        found, notes = calls_of(flex_attention, q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert not notes and found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_under_autocast_it_computes_in_the_smaller_type():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = calls_of(flex_attention, q, k, v)
    assert found.dtype == torch.bfloat16
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


def kinds(target, arguments):
    """Shape, strides and type of each result, and as its fake says."""
    mode = torch_internals.new_fake_mode()
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, tuple(arguments))
    with mode:
        said = target(*fakes)
    return [
        [(tuple(t.shape), t.stride(), t.dtype) for t in found]
        for found in (target(*arguments), said)
    ]


@pytest.mark.parametrize("score", ["slopes", "capped"])
def test_shapes_and_strides_are_as_promised(score):
    one = call(score, "documents", grouped=True)
    found, said = kinds(FLEX, one)
    assert found == said
    result, sums = FLEX(*one)
    learned = [0] if score == "slopes" else []
    arguments = (torch.randn(result.shape), *one[:6], result, sums, *one[6:], learned)
    found, said = kinds(flex.FLEX_BACKWARD, arguments)
    assert found == said and len(found) == 3 + len(learned)


def test_products_are_counted():
    one = call("capped", "causal")
    products = 2.0 * ROWS * HEADS * LENGTH * LENGTH * WIDTH
    result, sums = FLEX(*one)
    assert flops_of(FLEX, one, (result, sums)) == 2 * products
    arguments = (result, *one[:6], result, sums, *one[6:], [])
    assert flops_of(flex.FLEX_BACKWARD, arguments, []) == 5 * products


@settings(deadline=None, max_examples=40)
@given(FUNCTIONS)
def test_any_function_of_a_small_grammar_is_the_arithmetic_that_it_says(function):
    """Result and gradients, of the slopes too; rows see what the table hides from others."""
    table, slopes = torch.linspace(-1, 1, ROWS * 5).view(ROWS, 5), torch.linspace(0.1, 1, HEADS)
    q, k, v = (torch.randn(ROWS, n, 5, WIDTH) for n in (HEADS, 2, 2))

    def score(s, b, h, i, j, t, u):
        return function(s, b, h, i, j, t, u) * 1.0 + s * 0

    def shown(b, h, i, j):
        return (table[b, j] > -0.9) | (i >= j)

    text = written(score, table, slopes)
    hides = "look(t0, [b, k]); v1 = aten.gt.Scalar(v0, -0.9); v2 = aten.ge.Tensor(q, k)"
    mask = f"def f(b, h, q, k, t0): v0 = {hides}; v3 = aten.bitwise_or.Tensor(v1, v2); return v3"
    one = Flex(q, k, v, [table, slopes], [table], [], text, mask, 0.3, [5, 5, 128, 128, 0], "{}")
    leaves = [t.clone().requires_grad_() for t in (q, k, v, slopes)]

    def by_parts(*arguments):
        return score(*arguments, table, leaves[3])

    expected = by_hand(*leaves[:3], by_parts, shown, 0.3)
    close(flex.plain_result(one)[:1], [expected])
    gradient = torch.randn(expected.shape)
    found = flex.plain_gradients(one, gradient, [1])
    close(
        found,
        torch.autograd.grad(expected, leaves, gradient, allow_unused=True, materialize_grads=True),
    )
