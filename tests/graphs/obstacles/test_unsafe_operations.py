"""Operators whose kernels wait for the device."""

import torch

from tests.graphs.programs import named, planned

WHY = "its kernel waits for the device, or computes on the host"
DO = "compute it outside the step, or with another operator"


@torch.library.custom_op(
    "tests_of_graphs::waits", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def waits(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


@waits.register_fake
def _(x):
    return torch.empty_like(x)


def histogram(y, x):
    return y.sum() * torch.histc(x, 4)


def eigenvalues(y, x):
    return torch.linalg.eigvalsh(y @ y.T)


def inverse(y, x):
    return torch.linalg.inv(y @ y.T + torch.eye(4))


def test_a_histogram():
    line = "test_unsafe_operations.py in histogram: return y.sum() * torch.histc(x, 4)"
    assert planned(histogram) == [f"histc [] {WHY}\n({line}): {DO}"]


def test_eigenvalues():
    line = "test_unsafe_operations.py in eigenvalues: return torch.linalg.eigvalsh(y @ y.T)"
    assert planned(eigenvalues) == [f"_linalg_eigh [] {WHY}\n({line}): {DO}"]


def test_an_inverse_is_none():
    assert planned(inverse) == []


def test_an_operator_of_ones_own_that_is_tagged():
    assert named(lambda x: waits(x), (4, 4)) == [f"net/waits [net] {WHY}\n(net.py): {DO}"]
