"""Operators whose kernels wait for the device."""

import torch

from tests.graphs.programs import planned

WHY = "its kernel waits for the device, or computes on the host"
DO = "compute it outside the step, or with another operator"


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
