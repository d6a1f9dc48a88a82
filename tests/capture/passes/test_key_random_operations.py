"""key_random_operations: every random operation becomes a function of seed, step and name."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.capture.passes.key_random_operations import key_random_operations
from stepgraph.errors import RandomOperationError
from stepgraph.program import roles
from stepgraph.program.randomness import RANDOM
from tests.support import assert_golden, captured, values

ROWS = 40_000


class Net(nn.Module):
    """What ``draw`` makes of a column of halves, times one (so that there is a gradient)."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.draw(x) * self.one


def draws(draw, x=None, step=3):
    """The numbers that the keyed program draws."""
    x = torch.full((ROWS, 1), 0.5) if x is None else x
    model = Net(draw)
    program = key_random_operations(captured(model, (x,), training=False))
    inputs = values(model, (x,))
    inputs.tensors[roles.Seed()] = torch.tensor([0, step, 0])
    (result,) = inputs.execute(program).values()
    return result


# name: (draw, mean, standard deviation)
DRAWS = {
    "dropout": (lambda x: F.dropout(x, 0.2), 0.5, 0.25),
    "dropout1d": (lambda x: F.dropout1d(x.view(-1, 1, 1), 0.2).flatten(), 0.5, 0.25),
    "bernoulli": (torch.bernoulli, 0.5, 0.5),
    "bernoulli_p": (lambda x: torch.bernoulli(x, 0.1), 0.1, 0.3),
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12)),
    "rand": (lambda x: x + torch.rand(x.shape), 1.0, math.sqrt(1 / 12)),
    "uniform": (lambda x: torch.empty_like(x).uniform_(2, 5), 3.5, 3 * math.sqrt(1 / 12)),
    "randn": (lambda x: x + torch.randn(x.shape), 0.5, 1.0),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
    "normal_of_tensors": (lambda x: torch.normal(x, x), 0.5, 0.5),
    "normal_of_mean": (lambda x: torch.normal(x, 2.0), 0.5, 2.0),
    "normal_of_std": (lambda x: torch.normal(1.0, x), 1.0, 0.5),
    "exponential": (lambda x: torch.empty_like(x).exponential_(4.0), 0.25, 0.25),
    "log_normal": (
        lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
        math.exp(0.125),
        math.sqrt((math.exp(0.25) - 1) * math.exp(0.25)),
    ),
    "randint": (lambda x: x + torch.randint(2, 6, x.shape), 4.0, math.sqrt(15 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, math.sqrt(15 / 12)),
    "rrelu": (lambda x: F.rrelu(-2 * x, 0.25, 0.75, training=True), -0.5, 0.5 * math.sqrt(1 / 12)),
    "multinomial": (
        lambda x: torch.cat([x, 3 * x], 1).multinomial(1).float(),
        0.75,
        math.sqrt(3 / 16),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_mean_and_deviation_are_those_of_the_operation(name):
    draw, mean, deviation = DRAWS[name]
    got = draws(draw).double()
    assert abs(got.mean() - mean) < 4 * deviation / math.sqrt(ROWS)
    assert abs(got.std() / deviation - 1) < 0.05
    assert not torch.equal(got, draws(draw, step=4))


def test_a_permutation_and_draws_without_replacement_are_complete():
    x = torch.full((50, 1), 0.5)
    assert sorted(draws(lambda x: torch.randperm(50).float(), x).tolist()) == list(range(50))
    picked = draws(lambda x: torch.multinomial(x.expand(50, 7), 7).float(), x)
    assert torch.equal(picked.sort(1).values, torch.arange(7.0).expand(50, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_uniform_number_is_never_one(dtype):
    got = draws(torch.rand_like, torch.zeros(300_000, 1, dtype=dtype))
    assert got.dtype == dtype
    assert got.min() >= 0 and got.max() < 1
    assert abs(got.double().mean() - 0.5) < 0.003


@pytest.mark.parametrize("p, kept", [(0.0, 1.0), (1.0, 0.0)])
def test_the_extremes_of_dropout(p, kept):
    def drop(x):
        return torch.native_dropout(x, p, True)[0]

    assert torch.equal(draws(drop), torch.full((ROWS, 1), 0.5 * kept))


def test_the_program_reads_a_seed_in_place_of_a_generator():
    program = captured(Net(lambda x: F.dropout(x, 0.25).sum()), torch.ones(2, 3))
    after = key_random_operations(program.copy())
    assert roles.Seed() in after.inputs
    assert_golden(__file__, "key_random_operations", program, after)


def test_a_program_without_randomness_gets_no_seed():
    program = captured(Net(lambda x: F.dropout(x, 0.25, training=False).sum()), torch.ones(2, 3))
    assert roles.Seed() not in key_random_operations(program).inputs


def test_operations_have_streams_of_their_own_that_others_do_not_move():
    class Drops(nn.Module):
        def __init__(self, also_first):
            super().__init__()
            self.first = nn.Dropout(0.5 if also_first else 0.0)
            self.second = nn.Dropout(0.5)
            self.third = nn.Dropout(0.5)
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.third(self.second(self.first(x) * self.one)).sum()

    def numbers(also_first):
        program = key_random_operations(captured(Drops(also_first), torch.ones(2, 3)))
        found = [n for n in program.operations() if n.target is RANDOM]
        return {n.meta["module"]: n.args[2] for n in found}

    all_three, two = numbers(True), numbers(False)
    assert len(set(all_three.values())) == 3
    assert two == {name: all_three[name] for name in ("second", "third")}


@pytest.mark.parametrize(
    "draw, why",
    [
        (lambda x: torch.poisson(x), "no keyed version"),
        (lambda x: x.expand(4, 3).multinomial(5, replacement=True) * x, "with replacement"),
    ],
)
def test_an_operation_without_an_entry_is_an_error_that_names_it(draw, why):
    with pytest.raises(RandomOperationError, match=why) as caught:
        draws(draw, torch.full((4, 1), 0.5))
    assert "test_key_random_operations.py" in str(caught.value)
