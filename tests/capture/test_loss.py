"""The loss in what a loss callable returns: found, or an error that says what was returned."""

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

import stepgraph
from stepgraph.capture.loss import loss_of
from stepgraph.errors import LossError

LOSS = torch.tensor(1.0)


@pytest.mark.parametrize(
    "result",
    [LOSS, {"loss": LOSS}, (LOSS, 2), [LOSS], ModelOutput(loss=LOSS), ModelOutput(first=LOSS)],
    ids=str,
)
def test_it_is_found(result):
    assert loss_of(result) is LOSS


def broken(loss):
    torch._dynamo.graph_break()
    return loss


UNUSABLE = {
    "a dict without it": (lambda y: {"nll": y.mean()}, r"returned a dict with \['nll'\]"),
    "an empty tuple": (lambda y: (), "returned a tuple"),
    "nothing": (lambda y: None, "returned a NoneType"),
    "a number": (lambda y: 3.0, "returned a float"),
    "text": (lambda y: "abc", "returned a str"),
    "no tensor first": (lambda y: (3.0, y.mean()), "returned a tuple"),
    "rows, broken": (broken, r"got shape \[4, 2\]"),
    "detached, broken": (lambda y: broken(y.mean().detach()), "no parameter gets a gradient"),
    "a dict, broken": (lambda y: {"nll": broken(y.mean())}, "returned a dict"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_is_none_is_an_error_that_says_what_came(name):
    made, message = UNUSABLE[name]
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda m, x: made(m(x))  # noqa: E731
    engine = stepgraph.Engine(model, optimizer=optimizer, loss=loss, lowering="eager")
    with pytest.raises(LossError, match=message):
        engine.step(torch.ones(4, 3))
