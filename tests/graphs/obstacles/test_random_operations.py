"""Draws from a generator that the step does not count."""

import torch

from tests.graphs.programs import named, planned

aten = torch.ops.aten


def poisson(y, x):
    return y * torch.poisson(x.abs())


def noise(y, x):
    return torch.dropout(y, 0.1, True) + torch.randn_like(x)


def test_a_draw_without_a_counter():
    assert named(lambda x: aten.mul.Tensor(x, aten.rand_like.default(x)), (4, 4)) == [
        "net/rand_like [net] it draws from a generator that no counter of the step advances\n(net.py): "
        "draw with torch.rand, randn, bernoulli or dropout, without a generator of its own"
    ]


def test_one_that_has_no_keyed_version():
    assert planned(poisson) == [
        "random operation aten.poisson.default in the training step: it has no keyed version, so it would "
        "differ from mesh to mesh\n(poisson: test_random_operations.py in poisson: return y * "
        "torch.poisson(x.abs())): draw with torch.rand, randn, randint, bernoulli or dropout, or pass the "
        "numbers in the batch"
    ]


def test_dropout_and_noise_are_none():
    assert planned(noise) == []
