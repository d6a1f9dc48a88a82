"""Values that model code reads from Python: changed between steps, or by the forward itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.torch_internals.python_values import Reads
from stepgraph.torch_internals.writes import _COUNTS

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
FACTOR = 1.0


class Net(nn.Module):
    """Reads attributes, a global, a dropout rate, a list and a dict."""

    scale = 1.0  # the class's

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.0)
        self.weight, self.flag = 1.0, True
        self.sizes, self.config = [1, 2], {"scale": 1.0}

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x))) * self.weight * self.config["scale"] * FACTOR
        h = h * len(self.sizes) if self.flag else h + 1
        return self.last(h).square().mean() * self.scale


class Counting(nn.Module):
    """A counter that nothing else reads; a flag for the first time; a result kept to be looked at."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.calls, self.seen, self.first = 0, 0.0, True

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + 0.5
        y = self.inner(x)
        if self.first:
            self.first = False
            y = y * 2
        self.kept = y.detach()
        return y.square().mean()


class Warming(nn.Module):
    """What it computes depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x).square().mean() * min(1.0, self.calls / 3)


class Remembering(nn.Module):
    """Keeps what it computed, in Python, for the next call."""

    def __init__(self):
        super().__init__()
        self.inner, self.memory = nn.Linear(6, 6), None

    def forward(self, x):
        h = self.inner(x)
        if self.memory is not None:
            h = h + 0.5 * self.memory
        self.memory = h.detach()
        return h.square().mean()


def both(make, loss=None, **options):
    """An engine, and what takes the same steps in plain PyTorch."""
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    loss = loss or (lambda m, batch: m(batch))
    twin, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    engine = stepgraph.Engine(
        model, loss=loss, optimizer=own, plan="ddp", lowering="eager", **options
    )

    def step(batch=X):
        twin.zero_grad()
        expected = loss(plain, batch)
        expected.backward()
        twin.step()
        torch.testing.assert_close(engine.step(batch), expected.detach())

    return engine, step, (plain, model)


def change_weight(model):
    model.weight = 0.5


def change_flag(model):
    model.flag = False


def change_list(model):
    model.sizes.append(3)


def change_dict(model):
    model.config["scale"] = 3.0


def change_function(model):
    model.first.forward = lambda x, own=model.first: nn.Linear.forward(own, x) * 2


def change_module(model):
    model.drop = nn.Tanh()


@pytest.mark.parametrize(
    "change",
    [change_weight, change_flag, change_list, change_dict, change_function, change_module],
)
def test_a_value_that_changed_between_steps_is_the_new_one(change):
    engine, step, models = both(Net)
    step()
    step()
    assert engine.stats.compiles == 1
    for model in models:
        change(model)
    step()
    step()
    assert engine.stats.compiles == 2
    assert "a value that the code reads has changed" in engine.stats.recompiles[0]


def test_a_global_and_a_closed_over_number_count(monkeypatch):
    held = {"a": 1.0}
    number = 1.0

    def loss(model, batch):
        return model(batch) * number * held["a"]

    engine, step, _ = both(Net, loss)

    def steps():
        for _ in range(3):
            step()

    steps()
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    steps()
    number = 1.5
    steps()
    held["a"] = 0.25
    steps()
    monkeypatch.setattr(Net, "scale", 2.0)
    steps()
    assert engine.stats.compiles == 5
    assert "FACTOR == 1.0" in engine.stats.recompiles[0]
    assert "test_python_values.py:" in engine.stats.recompiles[0]


@pytest.mark.skipif(not _COUNTS, reason="this Python does not count writes")
def test_nothing_is_compared_where_nothing_was_written(monkeypatch):
    compared = []
    hold = Reads.hold
    monkeypatch.setattr(Reads, "hold", lambda self: compared.append(hold(self)) or compared[-1])
    engine, step, models = both(Net)
    for _ in range(4):
        step()
    assert compared == [True] * 2  # then nothing was written to since before the last one
    for model in models:
        model.unread = 1
    for _ in range(5):
        step()
    assert compared == [True] * 5  # what is there may be another object, which is found
    assert engine.stats.compiles == 1


def test_an_equal_object_in_place_of_what_was_read_is_looked_at_from_then_on():
    engine, step, models = both(Net)
    for _ in range(3):
        step()
    for model in models:
        model.config, model.sizes = dict(model.config), list(model.sizes)
    for _ in range(4):
        step()
    for model in models:
        model.config["scale"] = 2.0
    step()
    step()
    for model in models:
        model.sizes.append(4)
    step()
    assert engine.stats.compiles == 3


def test_a_dropout_rate_that_changes_is_the_new_one():
    model = Net()
    engine = stepgraph.Engine(model, loss=lambda m, x: m(x), plan="ddp", lowering="eager")
    before = engine.step(X)
    model.drop.p = 1.0
    assert not torch.allclose(engine.step(X), before)
    torch.testing.assert_close(engine.step(X), model.last.bias.full_tensor().square().mean())


def test_a_value_that_is_put_back_compiles_nothing():
    engine, step, models = both(Net)
    for flag in (True, False, True, False, True):
        for model in models:
            model.flag = flag
        step()
    assert engine.stats.compiles == 2


def test_a_value_that_is_new_at_every_step_is_an_error_that_says_what_to_do():
    engine, step, models = both(Net, max_shapes=3)
    with pytest.raises(stepgraph.errors.ChangingValueError) as caught:
        for number in range(5):
            for model in models:
                model.weight = 1.0 + number
            step()
    assert engine.stats.steps == 3
    for text in ("weight == 1.0", "weight == 3.0", "register_buffer", "test_python_values.py:"):
        assert text in str(caught.value)


def test_a_buffer_in_its_place_compiles_once():
    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("weight", torch.ones(()))

        def forward(self, x):
            return self.inner(x).square().mean() * self.weight

    engine, step, models = both(Annealed)
    for number in range(4):
        for model in models:
            model.weight.fill_(1.0 / (number + 1))
        step()
    assert engine.stats.compiles == 1


def test_recompilations_by_values_are_counted_and_can_be_forbidden():
    engine, step, models = both(Net)
    with stepgraph.no_recompiles(after=1):
        step()
        models[0].weight = models[1].weight = 2.0
        with pytest.raises(stepgraph.errors.RecompilationError, match="weight == 1.0"):
            step()


def test_what_the_forward_changes_is_changed():
    engine, step, (plain, model) = both(Counting)
    for _ in range(4):
        step()
        assert (model.calls, model.seen, model.first) == (plain.calls, plain.seen, plain.first)
    assert engine.stats.compiles == 2  # the first time, and every other


def test_a_counter_that_is_read_is_never_the_first_steps():
    engine, step, (plain, model) = both(Warming, max_shapes=3)
    for _ in range(3):
        step()
        assert model.calls == plain.calls
    with pytest.raises(stepgraph.errors.ChangingValueError, match="calls == "):
        step()


def test_counters_count_micro_batches_and_evaluations():
    engine, step, (_, model) = both(Counting)
    model.first = False
    micro = stepgraph.Engine(
        Counting(), loss=lambda m, x: m(x), plan="ddp", lowering="eager", micro_batches=2
    )
    micro.model.first = False
    micro.step(X)
    assert micro.model.calls == 2
    engine.evaluate(X)
    assert model.calls == 1


def test_a_value_that_changes_from_micro_batch_to_micro_batch_is_an_error():
    engine = stepgraph.Engine(
        Counting(), loss=lambda m, x: m(x), plan="ddp", lowering="eager", micro_batches=2
    )
    with pytest.raises(stepgraph.errors.CaptureError, match="reads model.first and changes it"):
        engine.step(X)


def test_tensors_kept_for_the_next_call_are_not_forgotten():
    engine, step, _ = both(Remembering)
    for _ in range(3):
        step()
    assert "keeps tensors in model.memory for its next call" in engine.report()


def test_a_plan_says_it_too():
    with pytest.raises(stepgraph.errors.GraphBreakError, match="keeps tensors in model.memory"):
        stepgraph.plan(Remembering(), example=X, loss=lambda m, x: m(x), mesh="dp=2")


def halved(parameter):
    parameter.data = parameter.detach() * 0.5


def whole(parameter):
    parameter.data = torch.zeros(parameter.shape)


def averaged(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())


def loaded(model):
    state = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "assign, says",
    [(averaged, "other data was assigned"), (loaded, "replaced|other data was assigned")],
)
def test_what_torch_puts_in_place_of_all_parameters_is_not_ignored(assign, says):
    engine, step, (_, model) = both(Net)
    step()
    assign(model)
    with pytest.raises(stepgraph.errors.UsageError, match=says):
        engine.step(X)


@pytest.mark.parametrize("assign", [halved, whole])
@pytest.mark.parametrize("make", [Net, Remembering])
def test_data_that_is_assigned_is_not_ignored(assign, make):
    engine, step, (_, model) = both(make)
    step()
    assign(next(model.parameters()))
    name = next(name for name, _ in model.named_parameters())
    with pytest.raises(stepgraph.errors.UsageError, match=f"other data was assigned .*{name}"):
        engine.step(X)


def test_data_that_is_written_in_place_counts():
    engine, step, models = both(Net)
    step()
    for model in models:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    step()
    assert engine.stats.compiles == 1


class Settling(nn.Module):
    """Notes at its first call what it would find out anyway, as models of the transformers do."""

    def __init__(self):
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 1), None

    def forward(self, x):
        if self.kind is None:
            self.kind = "regression"
        y = self.inner(x).square()
        return y.mean() if self.kind == "regression" else y.sum()


def test_a_value_that_changes_nothing_compiles_nothing():
    engine, step, (_, model) = both(Settling)
    for _ in range(3):
        step()
    assert (model.kind, engine.stats.compiles, engine.stats.recompiles) == ("regression", 1, [])


def test_a_module_that_computes_the_same_is_looked_at_from_then_on():
    """Whether a rate of zero makes a program of its own is torch's matter: newer ones make none."""
    engine, step, models = both(Net)
    step()
    for made in (nn.Identity, nn.Tanh):
        for model in models:
            model.drop = made()
        step()
    assert "nn.modules.linear.Identity" in engine.stats.recompiles[-1]
    assert "model.drop" in engine.stats.recompiles[-1]
