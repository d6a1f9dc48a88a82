"""Graph by graph: what users do to a model or a batch that is not what the graphs were captured for."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import BatchError, CaptureError, HookError, ShapeLimitError, UsageError

# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
ROWS = 8


class Broken(nn.Module):
    """Uneven shards, and with one result a weight of one row, behind a graph break."""

    def __init__(self, results: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, results)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(hidden)


class Averaging(Broken):
    """Assigns a buffer anew."""

    def forward(self, x):
        self.mean = self.mean * 0.5 + 0.5
        return super().forward(x)


class Halving(Broken):
    """Breaks no graph, and puts another buffer in place of its own."""

    def forward(self, x):
        self.mean = self.mean * 0.5 + 1
        return self.last((self.first(x) + self.mean).tanh())


class Table(Broken):
    """An embedding that writes into its table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 6, max_norm=0.5)

    def forward(self, x):
        return super().forward(x.argmax(1))


class Whole(Broken):
    """Captured as one program."""

    def forward(self, x):
        return self.last((self.first(x) + self.mean).tanh())


class Penalised(Broken):
    """A weight crosses the break, and has as many rows as the ranks' batches, or a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        weight = torch.cat([self.first.weight, self.first.weight.tanh()])[:ROWS] * self.scale
        torch._dynamo.graph_break()
        return self.last(self.first(x).tanh()).square().sum() + weight.square().sum()


def batch(rows=ROWS, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator).chunk(ranks)[rank]


def squares(model, x):
    return model(x).square().sum()


def several(model, x):
    result = model(x)
    torch._dynamo.graph_break()
    right = result.argmax(1) == 0
    return {
        "rows": result,
        "sum": result.square().sum(),
        "mean": result.mean(),
        "ratio": (result * right[:, None]).sum() / right.sum(),
        "count": right.sum(),
        "largest": result.amax(),
        "by column": nn.functional.one_hot(result.argmax(1), 4).sum(0),
    }


def engine_of(model, loss=squares, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return stepgraph.Engine(
        model, loss=loss, optimizer=optimizer, plan="zero3", lowering="eager", **settings
    )


def whole(tensors):
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v) for k, v in tensors.items()}


def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None, ""


# -- what a rank does, by name


def one_row(part):
    model = Broken(1)
    engine = engine_of(model)
    losses = [engine.step(part()).item() for _ in range(3)]
    return losses, whole(model.state_dict())


def evaluation(part):
    engine = engine_of(Broken(), several)
    return engine.evaluate(part()), engine.notes


def evaluation_after_training(part):
    engine = engine_of(Broken())
    trained = engine(part()).item()
    return trained, engine.evaluate(part()).item()


def more_shapes_than_kept(part):
    engine = engine_of(Broken(), max_shapes=2)
    values = [engine(part(rows)).item() for rows in (2, 4)]
    values += [engine.evaluate(part(rows)).item() for rows in (2, 4)]
    return values, error_of(engine, part(6))


def shapes_that_both_know(part):
    rank, found = int(os.environ["RANK"]), []
    for model in (Broken(), Whole()):
        engine = engine_of(model)
        for rows in (2, 4):
            engine.step(part(rows))
        found.append(error_of(engine.step, part((2, 4)[rank])))
        found.append(engine.step(part(4)).isfinite().item())
    return found


def a_forward_hook_comes_and_goes(part):
    model = Broken()
    engine = engine_of(model)
    values = [engine.evaluate(part()).item()]
    handle = model.first.register_forward_hook(lambda module, inputs, result: result * 2)
    values.append(engine.evaluate(part()).item())
    handle.remove()
    values.append(engine.evaluate(part()).item())
    return values, engine.stats.recompiles


def a_backward_hook_comes(part):
    model = Broken()
    engine = engine_of(model)
    engine.step(part())
    model.first.register_full_backward_hook(lambda *_: None)
    return error_of(engine.step, part())


def written_between_forward_and_backward(part):
    found = []
    for make in (Broken, Whole):
        model = stepgraph.parallelize(make(), plan="zero3", lowering="eager", example=batch())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first, second = model(part()).square().sum(), model(part()).square().sum()
        first.backward()
        optimizer.step()
        found.append(error_of(second.backward))
        engine = engine_of(make())
        first, second = engine(part()), engine(part())
        engine.backward(first)
        engine.optimizer_step()
        found.append(error_of(second.backward))
    return found


def a_module_is_replaced(part):
    found = []
    for make in (Broken, Whole):
        model = make()
        engine = engine_of(model)
        engine.step(part())
        model.last = nn.Linear(6, 3)
        found.append(error_of(engine.step, part()))
    return found


def a_buffer_is_replaced(part):
    model = Whole()
    engine = engine_of(model)
    engine.evaluate(part())
    model.mean = torch.ones(6)
    value = engine.evaluate(part()).item()
    model.mean = torch.ones(1)
    return value, error_of(engine.evaluate, part())


def a_buffer_that_the_forward_assigns(part):
    model = Averaging()
    engine = engine_of(model)
    before = {name: tensor.clone() for name, tensor in whole(engine.state_dict()).items()}
    engine.step(part())
    changed = model.mean.clone()
    engine.load_state_dict(before)
    return changed, model.mean.clone()


def a_buffer_that_a_forward_without_breaks_assigns(part):
    model = Halving()
    engine = engine_of(model)
    return [engine.step(part()).item() for _ in range(2)], model.mean.clone(), engine.notes


def a_table_that_is_renormalised(part):
    return error_of(engine_of(Table()).step, part())


def a_weight_that_crosses_a_break(part):
    model = Penalised()
    engine = engine_of(model, lambda m, x: m(x))
    return engine(part()).item(), engine.notes


def by_the_table(model, x):
    return model(x).square().sum() / model.table.sum()


def a_table_that_a_model_holds(part):
    model = Broken()
    model.table = torch.ones(ROWS // 2)  # as many as a rank has rows
    return engine_of(model, by_the_table)(part()).item()


def of_saved(model, x):
    """Its backward reads what the forward made and nobody else has."""
    return model(x).exp().sin().square().mean()


def a_backward_twice(part):
    found = []
    for lowering in ("eager", "inductor"):
        model = Broken()
        engine = stepgraph.Engine(model, loss=of_saved, plan="zero3", lowering=lowering)
        loss = engine(part())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    return found


def in_another_order(model, x):
    result = model(x)
    return {"columns": result.t(), "blocks": torch.stack([result, 2 * result]).flatten(0, 1)}


def rows_in_another_order(part):
    return engine_of(Broken(), in_another_order).evaluate(part())


def micro_batches(part):
    engine = engine_of(Broken(), micro_batches=2)
    engine.step(part())
    return engine.notes


def constants(part):
    engine = engine_of(Whole(), lambda m, b: squares(m, b["x"]))
    engine.step({"x": part(), "how": squares})
    return error_of(engine.step, {"x": part(), "how": {1, 2}})


CASES = [
    one_row,
    evaluation,
    shapes_that_both_know,
    a_backward_hook_comes,
    a_module_is_replaced,
    a_buffer_is_replaced,
    a_buffer_that_the_forward_assigns,
    a_buffer_that_a_forward_without_breaks_assigns,
    a_table_that_is_renormalised,
    a_backward_twice,
    micro_batches,
    constants,
]
RARE = [
    more_shapes_than_kept,
    evaluation_after_training,
    a_weight_that_crosses_a_break,
    a_table_that_a_model_holds,
    rows_in_another_order,
    a_forward_hook_comes_and_goes,
    written_between_forward_and_backward,
]


def run(cases):
    """One rank: some cases."""
    rank = int(os.environ["RANK"])
    return {case.__name__: case(lambda rows=ROWS: batch(rows, rank, 2)) for case in cases}


@pytest.fixture(scope="module")
def found():
    return launch(run, CASES, ranks=2)[0]


@pytest.fixture(scope="module")
def rare():
    return launch(run, RARE, ranks=2)[0]


def trained(model, steps):
    """The losses of plain SGD in one process; ``model`` is trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = squares(model, batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_parameter_of_one_row(found):
    losses, state = found["one_row"]
    model = Broken(1)
    assert losses == pytest.approx(trained(model, len(losses)), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def test_evaluation_is_that_of_the_global_batch(found):
    results, notes = found["evaluation"]
    with torch.no_grad():
        wanted = several(Broken(), batch())
    for name, value in wanted.items():
        torch.testing.assert_close(results[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert len(notes) == 1  # that it runs graph by graph


@pytest.mark.slow
def test_evaluation_and_training_have_one_loss(rare):
    trained, evaluated = rare["evaluation_after_training"]
    assert trained == evaluated == pytest.approx(squares(Broken(), batch()).item(), rel=1e-5)


@pytest.mark.slow
def test_a_shape_beyond_the_limit_is_an_error_and_not_another_loss(rare):
    values, (kind, text) = rare["more_shapes_than_kept"]
    wanted = [squares(Broken(), batch(rows)).item() for rows in (2, 4)]
    assert values == pytest.approx(wanted * 2, rel=1e-5)
    assert kind is ShapeLimitError and "[1, 4]" in text and "[2, 4]" in text


def test_ranks_with_different_shapes_that_each_knows_are_an_error(found):
    broken, went_on, whole, went_on_too = found["shapes_that_both_know"]
    assert went_on and went_on_too
    for kind, text in (broken, whole):
        assert kind is BatchError and "rank 0: " in text and "rank 1: " in text


@pytest.mark.slow
def test_forward_hooks_are_those_of_the_moment(rare):
    values, recompiles = rare["a_forward_hook_comes_and_goes"]
    model = Broken()
    plain = squares(model, batch()).item()
    model.first.register_forward_hook(lambda module, inputs, result: result * 2)
    assert values == pytest.approx([plain, squares(model, batch()).item(), plain], rel=1e-5)
    assert recompiles == ["evaluate: forward hooks changed"] * 2


def test_a_backward_hook_is_an_error(found):
    kind, text = found["a_backward_hook_comes"]
    assert kind is HookError and "'first'" in text


@pytest.mark.slow
def test_a_parameter_written_between_forward_and_backward_is_an_error(rare):
    for kind, text in rare["written_between_forward_and_backward"]:
        assert kind is RuntimeError and "was changed between forward" in text


def test_a_replaced_module_is_an_error(found):
    for kind, text in found["a_module_is_replaced"]:
        assert kind is UsageError and "last.weight" in text


def test_a_replaced_buffer_is_taken_over(found):
    value, (kind, text) = found["a_buffer_is_replaced"]
    model = Whole()
    model.mean = torch.ones(6)
    assert value == pytest.approx(squares(model, batch()).item(), rel=1e-5)
    assert kind is UsageError and "'mean'" in text


def test_a_buffer_that_the_forward_assigns_is_loaded(found):
    changed, loaded = found["a_buffer_that_the_forward_assigns"]
    assert changed.tolist() == [0.5] * 6 and loaded.tolist() == [0.0] * 6


def test_a_buffer_that_a_forward_without_breaks_assigns_is_part_of_the_step(found):
    losses, mean, notes = found["a_buffer_that_a_forward_without_breaks_assigns"]
    model = Halving()
    assert losses == pytest.approx(trained(model, len(losses)), rel=1e-5)
    assert mean.tolist() == model.mean.tolist()
    assert not any("graph by graph" in note for note in notes)


def test_an_embedding_that_writes_into_its_table_is_an_error(found):
    kind, text = found["a_table_that_is_renormalised"]
    assert kind is CaptureError and "writes into a parameter" in text


@pytest.mark.slow
def test_a_weight_is_not_taken_for_rows(rare):
    value, notes = rare["a_weight_that_crosses_a_break"]
    model, parts = Penalised(), batch().chunk(2)
    own = sum(model(part).item() for part in parts) / 2
    assert value == pytest.approx(own, rel=1e-5)
    assert any("a term of the loss is no sum over the batch" in note for note in notes)


@pytest.mark.slow
def test_a_table_that_a_model_holds_is_not_taken_for_rows(rare):
    wanted = squares(Broken(), batch()).item() / (ROWS // 2)
    assert rare["a_table_that_a_model_holds"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_rows_are_put_together_along_the_dimension_they_lie_in(rare):
    for name, wanted in in_another_order(Broken(), batch()).items():
        torch.testing.assert_close(rare["rows_in_another_order"][name], wanted)


def test_a_backward_runs_twice(found):
    model = Broken()
    loss = of_saved(model, batch())
    loss.backward(retain_graph=True)
    loss.backward()
    for gradients in found["a_backward_twice"]:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_micro_batches_are_said_to_be_averaged(found):
    assert any(note.startswith("micro_batches:") for note in found["micro_batches"])


def test_a_constant_that_cannot_be_compared_is_an_error(found):
    kind, text = found["constants"]
    assert kind is BatchError and "how is a set" in text
