"""One parameter's update as one operator, and torch's kernel for it."""

import pytest
import torch

from stepgraph.operators.updates import (
    FUSED_ADAM,
    PIECE,
    UPDATE,
    decomposed,
    held_inside,
    operations_in,
)

TEXT = (
    "def f(t0, t1, n0): v0 = aten.mul.Tensor(t1, n0); v1 = aten.sqrt.default(v0); "
    "v0 = aten.add.Tensor(t0, v1); return [v0, v1]"
)
aten = torch.ops.aten


def test_the_operator_computes_its_text():
    x, y, n = torch.ones(3), torch.full((3,), 2.0), torch.tensor(8.0)
    for run in (UPDATE, decomposed):
        new, root = run([x, y], [n], TEXT, "", [])
        assert torch.equal(root, torch.full((3,), 4.0))
        assert torch.equal(new, torch.full((3,), 5.0))


def test_a_large_one_is_computed_piece_by_piece_to_the_same_bits():
    torch.manual_seed(0)
    x, y, n = torch.rand(3, PIECE // 2 + 1), torch.rand(3, PIECE // 2 + 1), torch.tensor(8.0)
    for found, expected in zip(
        UPDATE([x, y], [n], TEXT, "", []), decomposed([x, y], [n], TEXT, "", []), strict=True
    ):
        assert torch.equal(found, expected)


def test_shapes_are_known_without_values():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3)
        new, root = UPDATE([x, x], [torch.empty(())], TEXT, "", [])
    assert new.shape == root.shape == (2, 3)


def test_what_is_in_a_text():
    assert operations_in(TEXT) == (aten.mul.Tensor, aten.sqrt.default, aten.add.Tensor)
    assert held_inside(TEXT) == 3  # two names, and the new value of one of them


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_torchs_step(decoupled, dtype):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameters = [torch.randn(4, 3, dtype=dtype), torch.randn(5, dtype=dtype)]
    expected = [torch.nn.Parameter(p.clone()) for p in parameters]
    told = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6}
    torchs = optimizer(expected, **told, foreach=False)
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(1, 4):
        gradients = [torch.randn(3, 4, dtype=dtype).t(), torch.randn(5, dtype=dtype)]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.clone()
        torchs.step()
        numbers = (0.01, 0.8, 0.9, 0.1, 1e-6)
        settings = [torch.tensor(float(step)), *(torch.tensor(n).double() for n in numbers)]
        FUSED_ADAM(parameters, gradients, means, squares, settings, decoupled, None)
    for found, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found, wanted.detach(), atol=1e-6, rtol=1e-5)
