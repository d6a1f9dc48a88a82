"""attention: through the one operator, torch's own results and gradients, for every kind of arguments."""

import pytest
import torch
import torch.nn.functional as F

from stepgraph.operators.attention import ATTENTION, attend


def rand(*shape, **options):
    return torch.randn(*shape, requires_grad=True, **options)


def rows(*shape, heads=None, width=None, keys=None):
    *lead, n, h = shape
    other = [*lead[:-1], heads or lead[-1], keys or n]
    return rand(*shape), rand(*other, h), rand(*other, width or h)


def hidden():
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[2] = False  # a query that sees nothing
    return mask


CASES = {
    "plain": (rows(2, 4, 6, 16), {}),
    "causal, no square": (rows(2, 4, 6, 16, keys=8), {"is_causal": True}),
    "hidden keys": (rows(2, 4, 6, 16, keys=8), {"attn_mask": hidden()}),
    "a row of a mask": (rows(2, 4, 6, 16), {"attn_mask": torch.randn(1, 6)}),
    "a mask for each head": (rows(2, 4, 6, 16), {"attn_mask": torch.randn(4, 6, 6)}),
    "a learned bias": (rows(2, 4, 6, 16), {"attn_mask": rand(1, 4, 6, 6)}),
    "a bias for all": (rows(2, 4, 6, 16), {"attn_mask": rand(6, 6)}),
    "groups of heads": (rows(2, 4, 6, 16, heads=2), {"enable_gqa": True, "is_causal": True}),
    "no batch": (rows(4, 6, 16), {"is_causal": True}),
    "two batch dimensions": (rows(3, 2, 4, 6, 16), {"attn_mask": torch.randn(2, 1, 6, 6)}),
    "one sequence": (rows(1, 6, 16), {}),
    "wide values": (rows(2, 4, 6, 16, width=32), {}),
    "keys for all": ((rand(2, 4, 6, 16), rand(1, 4, 6, 16), rand(1, 1, 6, 16)), {}),
    "scaled": (rows(2, 4, 6, 16), {"scale": 0.3}),
    "no keys": (rows(2, 4, 6, 16)[:1] + (rand(2, 4, 0, 16), rand(2, 4, 0, 16)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_attention(name):
    arguments, options = CASES[name]
    learned = [*arguments, *(t for t in options.values() if getattr(t, "requires_grad", False))]
    expected = F.scaled_dot_product_attention(*arguments, **options)
    found = attend(*arguments, **options)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    pairs = [torch.autograd.grad((x * weight).sum(), learned) for x in (found, expected)]
    torch.testing.assert_close(*pairs)


def test_in_double_precision_to_its_digits():
    arguments = [rand(2, 4, 6, 16, dtype=torch.float64) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*arguments)
    torch.testing.assert_close(attend(*arguments), expected, rtol=1e-12, atol=1e-12)


def test_two_byte_types_are_computed_in_float32():
    """As exactly as torch does it where no fused kernel does: the result is that of float32, rounded."""
    arguments = [t.detach().bfloat16() for t in rows(2, 4, 6, 16, width=8)]
    exact = attend(*[t.float() for t in arguments]).bfloat16()
    assert torch.equal(attend(*arguments), exact)
    assert torch.equal(F.scaled_dot_product_attention(*arguments), exact)


def test_under_autocast_it_computes_as_torchs_does():
    arguments = rows(2, 4, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = attend(*arguments), F.scaled_dot_product_attention(*arguments)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.016, atol=0.01)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_mapped_function_is_left_to_torch():
    q, k, v = (torch.randn(3, 2, 4, 6, 16) for _ in range(3))
    found = torch.func.vmap(attend)(q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_and_strides_are_as_promised(dtype, causal):
    q, k, v = (rand(2, 4, 6, 16, dtype=dtype) for _ in range(3))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ATTENTION, (q, k, v, None, None, causal, 0.25, 0.0), test_utils=tests)
