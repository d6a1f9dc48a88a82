"""find_normalisation: how a loss adds up over slices of its batch."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.analysis.loss_normalisation import by_rows, find_normalisation, find_totals
from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.index_rows_in_place import index_rows_in_place
from stepgraph.program import roles
from tests.graph_support import graph_program
from tests.support import captured, tiny_llama, token_batch


class Loss(nn.Module):
    """A linear layer and a loss on its result ``y``, a target and weights."""

    def __init__(self, reduce):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.reduce = reduce

    def forward(self, x, target, weight):
        return self.reduce(self.linear(x), target, weight)


BATCH = (torch.randn(6, 3), torch.randint(0, 4, (6,)), torch.ones(6))


def normalisation(reduce):
    return find_normalisation(captured(Loss(reduce), BATCH))


def test_a_mean_is_averaged():
    found = normalisation(lambda y, t, w: y.square().mean())
    assert found.exact and found.boundary is None and not found.tail
    assert set(found.totals.values()) == {"avg"}
    assert found.gradient_kind == "avg"


def test_a_sum_is_summed():
    found = normalisation(lambda y, t, w: y.square().sum())
    assert found.exact and found.boundary is None
    assert set(found.totals.values()) == {"sum"}
    assert found.gradient_kind == "sum"


EXACT_WITH_A_TAIL = {
    "ignored tokens": lambda y, t, w: nn.functional.cross_entropy(y, t, ignore_index=0),
    "a count": lambda y, t, w: (y.sum(1) * w).sum() / w.sum(),
    "a clamped count": lambda y, t, w: (y.sum(1) * w).sum() / w.sum().clamp(min=1),
    "a root": lambda y, t, w: y.square().sum().sqrt(),
}


@pytest.mark.parametrize("name", EXACT_WITH_A_TAIL)
def test_what_is_normalised_by_totals_has_a_tail(name):
    found = normalisation(EXACT_WITH_A_TAIL[name])
    if name == "a root":  # not proportional to a sum before the tail, but its factor is one number
        assert found.exact or found.reason
        return
    assert found.exact, found.reason
    assert found.boundary in found.tail
    assert len(found.totals) == 2 and set(found.totals.values()) == {"sum"}
    assert found.gradient_kind == "sum"


def test_totals_are_in_graph_order_so_that_all_ranks_add_them_up_alike():
    def loss(y, t, w):
        scale = w.sum() * (w * 2).sum() * (w + 1).sum() * w.exp().sum() * w.sqrt().sum()
        return (y.sum(1) * w).sum() / scale

    program = captured(Loss(loss), BATCH)
    found = find_normalisation(program)
    assert len(found.totals) == 6
    in_order = [n.meta["name"] for n in program.operations() if n.meta["name"] in found.totals]
    assert list(found.totals) == in_order


def test_a_transformers_token_count_is_exact():
    program = index_rows_in_place(drop_identities(captured(tiny_llama(1), token_batch(4))))
    found = find_normalisation(program)
    assert found.exact and found.gradient_kind == "sum" and len(found.totals) == 2


def test_two_means_added_are_exact():
    found = normalisation(lambda y, t, w: y.square().mean() + y.abs().mean())
    assert found.exact and found.gradient_kind == "avg"


def test_two_weighted_means_added_are_exact():
    assert normalisation(lambda y, t, w: y.square().mean() + 0.1 * y.abs().mean()).exact


def beside_twice_the_rows(reduce):
    larger = tuple(torch.cat([leaf, leaf]) for leaf in BATCH)
    program = captured(Loss(reduce), BATCH)
    twice = find_normalisation(captured(Loss(reduce), larger))
    return by_rows(find_normalisation(program), twice, program.result(roles.Loss()))


ROWS_AS_A_NUMBER = {
    "divided by the rows": lambda y, t, w: y.square().sum() / len(y),
    "times their inverse": lambda y, t, w: (1 / y.shape[0]) * y.square().sum(),
    "divided before the sum": lambda y, t, w: (y.square().sum(1) / len(y)).sum(),
    "divided by all elements": lambda y, t, w: y.square().sum() / y.numel(),
    "divided by a tensor of them": lambda y, t, w: y.square().sum() / torch.tensor(float(len(y))),
    "times one of their inverse": lambda y, t, w: y.square().sum() * torch.full((), 1 / len(y)),
}


@pytest.mark.parametrize("name", ROWS_AS_A_NUMBER)
def test_a_sum_divided_by_the_number_of_rows_is_a_mean(name):
    found = beside_twice_the_rows(ROWS_AS_A_NUMBER[name])
    assert found.exact and found.gradient_kind == "avg" and set(found.totals.values()) == {"avg"}


def test_a_number_that_stays_is_no_number_of_rows():
    found = beside_twice_the_rows(lambda y, t, w: y.square().sum() / 7)
    assert found.exact and found.gradient_kind == "sum"
    assert beside_twice_the_rows(lambda y, t, w: y.square().sum()).gradient_kind == "sum"


def test_other_uses_of_the_number_of_rows_are_inexact():
    found = beside_twice_the_rows(lambda y, t, w: y.square().sum() / len(y) ** 2)
    assert not found.exact and "rows" in found.reason
    found = beside_twice_the_rows(lambda y, t, w: len(y) * y.sum() / w.sum())
    assert not found.exact and "rows" in found.reason


INEXACT = {
    "a mean and a sum": (lambda y, t, w: y.square().mean() + y.sum(), "different ways|whole batch"),
    "two counts": (
        lambda y, t, w: (y.sum(1) * w).sum() / w.sum() + (y.sum(1) * t).sum() / t.sum(),
        "different ways|whole batch",
    ),
    "centred on the batch": (
        lambda y, t, w: (y - y.mean(0)).square().mean(),
        "whole batch|different",
    ),
    "a maximum": (lambda y, t, w: y.max(), "maximum|whole batch|different"),
    "a product of means": (
        lambda y, t, w: y.mean() * y.square().mean(),
        "sum over|different|whole",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_does_not_add_up_is_inexact_and_says_why(name):
    reduce, reason = INEXACT[name]
    found = normalisation(reduce)
    assert not found.exact
    assert re.search(reason, found.reason), found.reason
    assert found.boundary is None and set(found.totals.values()) == {"avg"}


def test_batch_norm_is_inexact_and_names_the_operation():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x)).square().mean()

    found = find_normalisation(captured(Normed(), torch.randn(6, 3)))
    assert not found.exact
    assert "norm" in found.reason and "whole batch" in found.reason


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_penalty_on_weights_beside_a_sum_is_inexact(kind):
    """Every slice would add its gradient again; means of slices' gradients hold it once."""

    class Penalised(Loss):
        def forward(self, x, target, weight):
            return super().forward(x, target, weight) + self.linear.weight.square().sum()

    reduce = getattr(torch, kind)
    found = find_normalisation(captured(Penalised(lambda y, t, w: reduce(y.square())), BATCH))
    assert found.exact == (kind == "mean")
    assert found.exact or "no sum over the batch" in found.reason


def graph_results(function, *inputs):
    """What results of a graph without a backward need, for rows of 4."""
    return find_totals(graph_program(function, *inputs), 4, {}, adds=True)


def test_results_without_a_gradient_are_added_up_by_their_kind():
    def results(x, y):
        total = x.sum()
        return x * 2, total, x.mean(), x.amax(), x.sum(0), total / y.sum()

    found = graph_results(results, torch.ones(4, 3), torch.ones(4))
    assert [*found.kinds.values()] == ["sum", "sum"] and found.tail  # those of the quotient alone
    pending = [Partial(kind) for kind in ("sum", "avg", "max", "sum")]
    pending[0] = Replicate()  # it is there added up, so it is handed out so
    assert found.results == dict(enumerate([Shard(0), *pending, Replicate()]))


def test_a_result_that_needs_the_whole_batch_does_not_spoil_the_others():
    def results(x):
        return x.softmax(0), x.sum(), x.sum() / 4

    found = graph_results(results, torch.ones(4, 3))
    assert not found.kinds and found.results[1] == Partial("sum")
    assert "needs the whole batch" in found.results[0].reason
    assert "may count rows" in found.results[2].reason


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x.sum() / 4,
        lambda x: (x > 0).sum() / 4,
        lambda x: (x > 0).sum() * 100 // 4,
        lambda x: x.sum() / torch.tensor(4.0),
        lambda x: (x / 4 * x).sum(),
        lambda x: x.mean() * 8,
    ],
)
def test_a_result_that_numbers_of_rows_went_into_is_each_ranks_own(result):
    found = graph_results(result, torch.ones(4, 3))
    assert not found.kinds and "may count rows" in found.results[0].reason


def test_which_results_are_rows():
    weight = torch.ones(3, 3)
    found = graph_results(lambda x: (x * 2, x.sum(0), x.t(), x @ weight), torch.ones(4, 3))
    assert found.results == {0: Shard(0), 1: Partial("sum"), 2: Shard(1), 3: Shard(0)}
