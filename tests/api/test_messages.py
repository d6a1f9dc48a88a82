"""What is said where something was forgotten or does not fit, and how often."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import BatchError, LossError, UnfilledModelError

X, LABELS = torch.ones(4, 4), torch.tensor([0, 1, 2, 7])
EAGER = {"plan": "ddp", "lowering": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def init_weights(self):
        nn.init.ones_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.shift.fill_(2.0)

    def forward(self, x):
        return self.linear(x) + self.shift


def engine_of(model=None, **options):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.Engine(model, optimizer=optimizer, **EAGER, **options)


# ------------------------------------------------------------------------------ on the meta device


def unfilled(**options):
    with torch.device("meta"):
        model = Net()
    return stepgraph.parallelize(model, example=(X,), **EAGER, **options)


@pytest.mark.parametrize("emptied", [True, False])
def test_a_module_on_the_meta_device_is_filled_as_the_message_says(emptied):
    model = unfilled()
    for call in (model, model.linear):
        with pytest.raises(UnfilledModelError, match=r"linear\.weight") as raised:
            call(X)
        assert "to_empty" in raised.value.do and "init_weights" in raised.value.do
        assert "engine" not in raised.value.do
    if emptied:
        model.to_empty(device="cpu")
    model.init_weights()
    model(X).sum().backward()
    assert torch.equal(model(X), torch.full((4, 3), 6.0))
    assert torch.equal(model.linear(X), torch.full((4, 3), 4.0))
    assert torch.equal(model.linear.weight.grad.full_tensor(), torch.full((3, 4), 4.0))
    assert model.forward.compiler.stats.compiles == 1


def test_what_was_not_filled_is_named():
    model = unfilled()
    nn.init.ones_(model.linear.weight)
    with pytest.raises(UnfilledModelError, match=r"no values for: linear\.bias, shift"):
        model(X)


# --------------------------------------------------------------------------------- a forgotten loss


class Passes(nn.Module):
    """Its signature takes anything; what it calls does not."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    "batch", [(X, LABELS), {"x": X, "labels": LABELS}, (X,)], ids=["2", "d", "1"]
)
@pytest.mark.parametrize("kind", [Net, Passes])
def test_a_forgotten_loss_is_named(batch, kind):
    with pytest.raises(LossError, match="loss=lambda"):
        engine_of(kind()).step(batch)


def test_a_forgotten_loss_of_a_plan_is_named():
    with pytest.raises(LossError, match="cannot be called with the batch.*") as raised:
        stepgraph.plan(Net(), example=(X, LABELS), mesh="dp=2", placement="zero3")
    assert "loss=" in raised.value.do


# -------------------------------------------------------------------------------------- the batch


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def in_two(model, batch):
    logits = model(batch["x"])
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, batch["labels"])


BAD = {"x": X, "other": torch.zeros(4, dtype=torch.long), "labels": LABELS}


@pytest.mark.parametrize("loss", [cross_entropy, in_two])
def test_a_label_out_of_range_names_its_tensor(loss):
    given = stepgraph.parallelize(Net(), example=BAD, loss=loss, **EAGER)
    for call in (engine_of(loss=loss).step, engine_of(loss=loss), given):
        with pytest.raises(BatchError, match=r"labels \(from 0 to 7\)") as raised:
            call(BAD)
        assert "other" not in raised.value.what and "ignore_index" in raised.value.do


def test_a_word_out_of_range_names_its_tensor():
    batch = {"input": torch.tensor([[1, 9]]), "weight": torch.ones(1)}
    with pytest.raises(BatchError, match=r"input \(from 1 to 9\)"):
        engine_of(nn.Embedding(5, 3), loss=lambda m, b: m(b["input"]).sum()).step(batch)


def test_a_batch_that_disagrees_in_dimension_0_gets_advice():
    with pytest.raises(BatchError, match="agree in dimension 0") as raised:
        engine_of(loss=cross_entropy).step({"x": X, "labels": LABELS[:2]})
    assert "expand" in raised.value.do and "0-dim" in raised.value.do


# -------------------------------------------------------------------------------------- notes


def noted():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("stepgraph").addHandler(handler)
    engine = engine_of(loss=lambda m, x: in_two(m, {"x": x, "labels": x[:, 0].long()}), mesh="dp=2")
    for _ in range(2):
        engine.step(X)
    return [record.getMessage() for record in records], engine.notes


def test_a_note_is_said_once_by_the_first_rank():
    (first, notes), (second, others) = launch(noted, ranks=2)
    assert first == notes == others and len(first) >= 1
    assert second == []


def test_compiled_autograd_that_has_nothing_to_add_is_no_fallback():
    model = Net()
    engine = stepgraph.Engine(model, loss=lambda m, x: m(x).sum(), strict=True, **EAGER)
    engine.compile("eager", compiled_autograd=True)
    engine(X).backward()
    assert any("nothing to add" in note for note in engine.notes)


class Skipped(Net):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x).sum()


def test_a_check_names_no_function_of_stepgraphs_as_the_break():
    engine = engine_of(Skipped())
    assert stepgraph.check(engine, (X,)).ok
    (note,) = (note for note in engine.notes if note.startswith("captured graph by graph"))
    assert "Skipped.forward" in note and "stepgraph/" not in note
