"""Which loss it is that ranks minimise where the model is captured graph by graph."""

from __future__ import annotations

import os

import pytest
import torch

import stepgraph
from stepgraph.cli.launcher import launch
from tests.end_to_end.test_balance import Model
from tests.sampling import sampled

ROWS = 8
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


@torch._dynamo.disable
def outside(y, weights):
    return (y.square().sum(1) * weights).sum() / weights.sum()


@torch._dynamo.disable
def divided_outside(total, count):
    return total / count


@torch._dynamo.disable
def clamped_outside(count):
    return count.clamp(min=1)


@torch._dynamo.disable
def scaled_outside(total, by):
    return total.mul_(by)


@torch._dynamo.disable
def centred_outside(y, mean):
    return y - mean


@torch._dynamo.disable
def counted_in_python(w):
    return int((w > 0.1).sum())


@torch._dynamo.disable
def stacked_outside(*values):
    return torch.stack(values)


def over_a_count_that_python_clamped(y, w):
    return y.square().sum() / clamped_outside((w > 0.1).sum())


def a_sum_that_python_writes_into(y, w):
    with torch.no_grad():
        total = y.square().sum()
    return y.abs().sum() / scaled_outside(total, 0.5)


def of_rows_that_python_made_of_a_mean(y, w):
    return centred_outside(y, y.mean(0)).square().mean()


def over_an_integer_that_python_made(y, w):
    count = counted_in_python(w)
    return y.square().sum() / count


def over_sums_that_python_stacked(y, w):
    both = stacked_outside(y.square().sum(), w.sum())
    return y.abs().sum() / both.prod()


def a_sum_and_a_count(y, w):
    kept = w > 0.1
    return divided_outside((y.square().sum(1) * kept).sum(), kept.sum())


def a_count_of_an_earlier_graph(y, w):
    count = (w > 0.5).sum()
    torch._dynamo.graph_break()
    return y.square().sum() / count


def a_mean_without_a_gradient(y, w):
    with torch.no_grad():
        torch._dynamo.graph_break()
        scale = y.abs().mean(0)
        torch._dynamo.graph_break()
    return (y / scale).square().mean()


def two_losses(y, w):
    first = y.square().mean()
    torch._dynamo.graph_break()
    second = (y.sum(1) * w).sum() / w.sum()
    torch._dynamo.graph_break()
    return first + second


def of_columns(y, w):
    columns = y.t().exp()
    torch._dynamo.graph_break()
    return (columns * w).sum() / w.sum()


@torch._dynamo.disable
def in_python(y):
    return y * 2


def of_rows_that_python_made(y, w):
    return (in_python(y).square().sum(1) * w).sum() / w.sum()


@torch._dynamo.disable
def counted(w):
    return (w > 0.1).sum()


def over_a_count_that_python_made(y, w):
    return y.square().sum() / counted(w)


def over_ones_of_an_earlier_graph(y, w):
    ones = torch.ones(len(y))
    torch._dynamo.graph_break()
    return (y.square().sum(1) * ones).sum() / ones.sum()


def over_their_sum_of_an_earlier_graph(y, w):
    count = torch.ones(len(y)).sum()
    torch._dynamo.graph_break()
    return y.square().sum() / count


def over_a_number_of_an_earlier_graph(y, w):
    count = torch.tensor(len(y) * 1.0)
    torch._dynamo.graph_break()
    return y.square().sum() / count


def against_labels_of_an_earlier_graph(y, w):
    labels = torch.zeros(len(y), dtype=torch.long)
    torch._dynamo.graph_break()
    return torch.nn.functional.cross_entropy(y, labels)


def times_random_rows_of_an_earlier_graph(y, w):
    kept = (torch.rand(len(y), 1) < 2).float()
    torch._dynamo.graph_break()
    return (y.square() * kept).sum() / kept.sum()


def of_the_batchs_sum(y, w):
    total = y.sum(0)
    torch._dynamo.graph_break()
    return (y - total).square().mean()


LOSSES = {
    "a sum over a tensor of the rows' number": lambda y, w: (
        y.square().sum() / torch.tensor(len(y) * 1.0)
    ),
    "a sum and a count divided outside": a_sum_and_a_count,
    "a count of an earlier graph": a_count_of_an_earlier_graph,
    "a mean without a gradient": a_mean_without_a_gradient,
    "two losses added": two_losses,
    "of columns": of_columns,
    "of the batch's sum": of_the_batchs_sum,
    "of rows that Python made": of_rows_that_python_made,
    "over a count that Python made": over_a_count_that_python_made,
    "over a count that Python clamped": over_a_count_that_python_clamped,
    "over a sum that Python writes into": a_sum_that_python_writes_into,
    "of rows that Python made of a mean": of_rows_that_python_made_of_a_mean,
    "over an integer that Python made": over_an_integer_that_python_made,
    "over sums that Python stacked": over_sums_that_python_stacked,
    "over ones of an earlier graph": over_ones_of_an_earlier_graph,
    "over their sum of an earlier graph": over_their_sum_of_an_earlier_graph,
    "over a number of an earlier graph": over_a_number_of_an_earlier_graph,
    "against labels of an earlier graph": against_labels_of_an_earlier_graph,
    "times random rows of an earlier graph": times_random_rows_of_an_earlier_graph,
    "a mean": lambda y, w: y.square().mean(),
    "a sum": lambda y, w: y.square().sum(),
    "a sum over the rows' number": lambda y, w: y.square().sum() / len(y),
    "a weighted mean": lambda y, w: (y.square().sum(1) * w).sum() / w.sum(),
    "no graph's": outside,
}


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 4, generator=generator), torch.rand(ROWS, generator=generator)


def made():
    torch.manual_seed(0)
    return Model()


def run(names):
    """One rank: value and gradients for some losses."""
    rank, found = int(os.environ["RANK"]), {}
    x, weights = (part.chunk(2)[rank] for part in batch())
    for name in names:
        model, loss = made(), LOSSES[name]
        engine = stepgraph.Engine(
            model, loss=lambda m, b, loss=loss: loss(m(b[0]), b[1]), plan="zero3", lowering="eager"
        )
        value = engine((x, weights))
        value.backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        evaluated, again = (engine.evaluate((x, weights)).item() for _ in range(2))
        assert evaluated == again
        notes = [n for n in engine.notes if n.startswith(("loss", "sums"))]
        found[name] = value.item(), gradients, evaluated, notes
    return found


@pytest.fixture(scope="module")
def found(request):
    """Of the losses that are asked for."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [test.callspec.params["name"] for test in tests if hasattr(test, "callspec")]
    return launch(run, names, ranks=2)[0]


OWN = (
    "a sum over the rows' number",
    "a sum over a tensor of the rows' number",
    "no graph's",
    "of the batch's sum",
    "a sum and a count divided outside",
    "a mean without a gradient",
    "over a count that Python made",
    "over a count that Python clamped",
    "over a sum that Python writes into",
    "of rows that Python made of a mean",
    "over an integer that Python made",
    "over sums that Python stacked",
    "over ones of an earlier graph",
    "over their sum of an earlier graph",
    "over a number of an earlier graph",
    "against labels of an earlier graph",
)


def expected(name, own):
    """Value and gradients: the mean of ranks' own, or the batch's."""
    model, (x, weights) = made(), batch()
    if own:
        pairs = zip(x.chunk(2), weights.chunk(2), strict=True)
        value = sum(LOSSES[name](model(part), weight) for part, weight in pairs) / 2
    else:
        value = LOSSES[name](model(x), weights)
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", sampled(LOSSES, every=7))
def test_a_loss_that_a_graph_makes_is_that_of_one_process(name, found):
    value, gradients, evaluated, notes = found[name]
    wanted, whole = expected(name, own=name in OWN)
    assert value == pytest.approx(wanted, rel=1e-5)
    for gradient, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(gradient, other)
    assert bool(notes) == (name in OWN), notes
    of_the_batch, _ = expected(name, own=False)
    if evaluated != pytest.approx(
        of_the_batch, rel=1e-5
    ):  # then it is as it trains, and said to be
        assert notes and evaluated == pytest.approx(wanted, rel=1e-5)
