"""parallelize(): the user's own loop and optimizer over sharded parameters and compiled programs."""

import functools
import os
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.capture.module import default_loss
from stepgraph.capture.step import Source
from stepgraph.cli.launcher import launch
from stepgraph.errors import LaunchError, StrictError, UsageError
from stepgraph.pipeline import capture_of, make
from stepgraph.placement.presets.named import for_own_update
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.driver import PassDriver
from stepgraph.runtime.batches import flatten_batch, global_spec
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.training import adamw, llama_batch, tiny_llama
from tests.support import HOST

STEPS = 4
TOLERANCE = 64 * torch.finfo(torch.float32).eps


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5))


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def loop(model, optimizer, loss_of, steps=STEPS):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    parts = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parts.items()}


def train_classifier(plan, mesh, lowering):
    """One rank of DDP's habit: a loss of this rank's own rows."""
    shape = parse_mesh(mesh)
    rank, ranks = shape.data_rank(int(os.environ["RANK"])), shape.data_size
    model = classifier()
    names = [name for name, _ in model.named_parameters()]
    made = stepgraph.parallelize(model, mesh=mesh, plan=plan, example=rows(0)[0], lowering=lowering)
    assert made is model and [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(step):
        x, y = (part.chunk(ranks)[rank] for part in rows(step))
        logits = model(x)
        assert logits.shape == (8 // ranks, 5)
        return F.cross_entropy(logits, y)

    loop(model, optimizer, loss_of)
    model.eval()
    with torch.no_grad():
        answer = model(rows(9)[0].chunk(ranks)[rank])
    stored = [tuple(p.placements) for p in model.parameters()]
    return whole(model), answer, stored, dict(model.named_buffers())


CLASSIFIERS = [("zero2", "dp=2", "eager"), ("zero3", "dp=2", "inductor"), ("tp", "tp=2", "eager")]


def train_classifiers():
    """One rank, one after the other: a launch takes longer than all of them."""
    return [train_classifier(*cell) for cell in CLASSIFIERS]


def test_a_loop_of_ones_own_trains_as_one_process_does():
    for (plan, _, _), found in zip(CLASSIFIERS, launch(train_classifiers, ranks=2)[0], strict=True):
        check_classifier(plan, *found)


def check_classifier(plan, parameters, answer, stored, buffers):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop(model, optimizer, lambda step: F.cross_entropy(model(rows(step)[0]), rows(step)[1]))
    for name, value in whole(model).items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=TOLERANCE)
    for name, value in model.named_buffers():
        torch.testing.assert_close(buffers[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    model.eval()
    expected = model(rows(9)[0])[: answer.shape[0]]
    torch.testing.assert_close(answer, expected, rtol=0, atol=16 * TOLERANCE)
    if plan in ("zero2", "zero3"):
        assert all(placements == (Shard(0),) for placements in stored)


def train_llama(plan, mesh, given_loss):
    """One rank; the loss is the model's own (that of the global batch), or given."""
    shape = parse_mesh(mesh)
    rank, ranks = shape.data_rank(int(os.environ["RANK"])), shape.data_size
    model = tiny_llama()
    loss = (lambda m, b: m(**b).loss) if given_loss else None
    model = stepgraph.parallelize(
        model, mesh=mesh, plan=plan, example=llama_batch(0), lowering="eager", loss=loss
    )
    optimizer = adamw(model.parameters())

    def loss_of(step):
        part = {name: value.chunk(ranks)[rank] for name, value in llama_batch(step).items()}
        return model(part) if given_loss else model(**part).loss

    losses = loop(model, optimizer, loss_of)
    return losses, whole(model), model.forward.compiler.stats.compiles


def train_llamas():
    return [train_llama("zero3", "dp=2", True), train_llama("zero1", "dp=2", False)]


@pytest.mark.slow
def test_the_loss_of_a_transformer_is_that_of_the_global_batch():
    model = tiny_llama()
    expected = loop(model, adamw(model.parameters()), lambda step: model(**llama_batch(step)).loss)
    for losses, parameters, compiles in launch(train_llamas, ranks=2)[0]:
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        for name, value in whole(model).items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-5)
        assert compiles == 1


@pytest.mark.parametrize(("plan", "gathers"), [("zero1", 1), ("zero2", 1), ("zero3", 2)])
def test_zero2_gathers_a_parameter_once_and_zero3_twice(plan, gathers):
    mesh = parse_mesh("dp=2")
    batch = flatten_batch(rows(0)[0], torch.device("cpu"))
    source = Source(classifier(), default_loss, global_spec(batch, 1, 1))
    driver = PassDriver(invariants=True)
    gradients = capture_of(source, StepSettings(), driver).gradients(as_module=True).programs
    own = preset_plan(for_own_update(plan), mesh, schedule="none")
    program = make(gradients, own, HOST, driver=driver).programs["gradients"]
    weight = program.input_node(roles.Param("3.weight"))
    assert len([user for user in weight.users if is_collective(user)]) == gathers


def test_results_and_tangents_have_roles_of_their_own():
    model = classifier()
    stepgraph.parallelize(model, example=rows(0)[0], plan="ddp", lowering="eager")
    program = model.forward.compiler.programs["gradients"]
    assert roles.ModuleResult(0) in program.outputs and roles.ResultTangent(0) in program.inputs


def test_several_results_of_which_one_is_used():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x, scale=1.0):
            return {"a": self.a(x) * scale, "most": self.b(x).argmax(-1), "b": self.b(x)}

    torch.manual_seed(0)
    plain = Two()
    torch.manual_seed(0)
    model = stepgraph.parallelize(Two(), example={"x": rows(0)[0]}, plan="ddp", lowering="eager")
    x = rows(1)[0]
    for one in (plain, model):
        out = one(x=x)
        (out["a"].sum() * 2).backward()
    assert torch.equal(model(x=x)["most"], plain(x=x)["most"])
    torch.testing.assert_close(model.a.weight.grad.to_local(), plain.a.weight.grad)
    assert model.b.weight.grad.to_local().abs().max() == 0


def test_what_would_be_wrong_is_an_error():
    model = classifier()
    stepgraph.parallelize(model, example=rows(0)[0], plan="ddp", lowering="eager")
    with pytest.raises(UsageError, match="replaced already"):
        stepgraph.parallelize(model, example=rows(0)[0])
    with pytest.raises(UsageError, match="unknown plan"):
        stepgraph.parallelize(classifier(), example=rows(0)[0], plan="zero9")


class Results(nn.Module):
    """Results that alias each other, an input, a buffer; and one that is None."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        h = self.linear(x)
        return h, h.t(), h.detach(), h[:, :1], None, x, (self.scale.exp(), h.mean(0))


def test_results_that_alias_each_other_keep_their_gradients():
    torch.manual_seed(0)
    plain = Results()
    torch.manual_seed(0)
    model = stepgraph.parallelize(Results(), example=rows(0)[0], plan="ddp", lowering="eager")
    x = rows(1)[0]
    for one in (plain, model):
        h, turned, cut_off, first, nothing, same, (scale, mean) = one(x)
        assert nothing is None and torch.equal(same, x) and not x.requires_grad
        loss = (
            h.sum() + (turned * 2).sum() + cut_off.sum() + first.pow(2).sum() + (scale * mean).sum()
        )
        loss.backward()
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.to_local(), expected, msg=name)


class Mixed(nn.Linear):
    """Returns more than tensors; an object that no program knows too, if asked."""

    def __init__(self, kind):
        super().__init__(6, 3)
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        others = {
            "rows": y.shape[0],
            "name": "y",
            "none": None,
            "on": True,
            "type": y.dtype,
            1: {2},
        }
        if self.kind is dict:
            return {"y": y, **others}
        return self.kind((y, list(others.values()), Returned(y.detach(), 3)))


class Returned(NamedTuple):
    value: torch.Tensor
    number: int


class Opaque:
    def __init__(self, values):
        self.values = values


def returned_by_modules():
    rank, found = int(os.environ["RANK"]), []
    for kind in (dict, tuple, list):
        torch.manual_seed(0)
        model = stepgraph.parallelize(
            Mixed(kind), mesh="dp=2", example=(rows(0)[0],), plan="zero3", lowering="eager"
        )
        x = rows(1)[0].chunk(2)[rank]
        with torch.no_grad():
            found += [pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, model(x)), model(x)]
        found.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, model(x)))
        assert model.forward.graphs is None
    return found


@pytest.mark.slow
def test_what_is_no_tensor_among_the_results_comes_back_as_it_is():
    expected = []
    for kind in (dict, tuple, list):
        torch.manual_seed(0)
        plain = Mixed(kind)
        with torch.no_grad():
            expected += [plain(rows(1)[0].chunk(2)[0])] * 3
    for found, wanted in zip(launch(returned_by_modules, ranks=2)[0], expected, strict=True):
        (values, form), (others, known) = map(pytree.tree_flatten, (found, wanted))
        assert form == known
        for one, other in zip(values, others, strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other)
            else:
                assert type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", [Opaque, lambda values: {"y": values[0], "all": Opaque(values)}])
def test_a_module_that_returns_an_object_of_its_own_runs_graph_by_graph(kind):
    model = stepgraph.parallelize(Mixed(kind), example=(rows(0)[0],), plan="ddp", lowering="eager")
    found = model(rows(1)[0])
    opaque = found if isinstance(found, Opaque) else found["all"]
    opaque.values[0].sum().backward()
    assert model.weight.grad is not None
    with pytest.raises(StrictError):
        stepgraph.parallelize(Mixed(kind), example=(rows(0)[0],), plan="ddp", strict=True)


def train_scaled():
    """One rank: a result that every rank has, in a loss of this rank's own rows."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = stepgraph.parallelize(
        Results(), mesh="dp=2", example=rows(0)[0], plan="ddp", lowering="eager"
    )
    h, *_, (scale, mean) = model(rows(1)[0].chunk(2)[rank])
    ((h * scale * (rank + 1)).sum() + (mean * (rank + 2)).sum()).backward()
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


def test_a_result_that_every_rank_has_may_be_used_in_losses_that_differ():
    grads = launch(train_scaled, ranks=2)
    torch.manual_seed(0)
    model = Results()
    h, *_, (scale, mean) = model(rows(1)[0])
    losses = [
        (h.chunk(2)[rank] * scale * (rank + 1)).sum() + (mean * (rank + 2)).sum()
        for rank in range(2)
    ]
    (sum(losses) / 2).backward()
    for found in grads:
        for name, value in found.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, msg=name)


def test_hooks_of_the_module_run_once():
    model = classifier()
    model.register_forward_hook(lambda module, given, result: result * 2)
    plain = classifier()
    stepgraph.parallelize(model, example=rows(0)[0], plan="ddp", lowering="eager")
    torch.testing.assert_close(model(rows(1)[0]), plain(rows(1)[0]) * 2)


def test_one_and_true_are_not_one_program():
    class Kinds(nn.Linear):
        def forward(self, x, kind):
            return super().forward(x) * (3.0 if kind is True else 1.0)

    torch.manual_seed(0)
    model = Kinds(6, 3)
    torch.manual_seed(0)
    plain = Kinds(6, 3)
    stepgraph.parallelize(model, example=(rows(0)[0], 1), plan="ddp", lowering="eager")
    for kind in (1, True):
        torch.testing.assert_close(model(rows(0)[0], kind), plain(rows(0)[0], kind))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_module_draws_its_masks_again(reentrant):
    """Two calls and one of another kind in between: each has its own masks, in both of its runs."""

    def gradient(is_checkpointed, after):
        torch.manual_seed(0)
        model = stepgraph.parallelize(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
            example=rows(0)[0], plan="ddp", lowering="eager",
        )  # fmt: skip
        x = rows(0)[0].requires_grad_()
        run = functools.partial(checkpoint, model, use_reentrant=reentrant)
        one, two = [run(x) if is_checkpointed else model(x) for _ in range(2)]
        assert not torch.equal(one, two)
        if after:
            model(x)
        (one * two).sum().backward()
        return x.grad

    wanted = gradient(False, False)
    for after in (False, True):
        assert torch.equal(gradient(True, after), wanted)


class Bag(nn.Module):
    """Of an operator that no rule can divide, rows of the batch and a mean over them."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(12, 6), nn.Linear(6, 9)

    def forward(self, x):
        h = self.out(self.table((x.abs() * 5).long().clamp(max=11)))
        return h, h.mean(0)


def train_bag():
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    x = torch.randn(14, 8)
    model = stepgraph.parallelize(Bag(), mesh="dp=2", example=(x,), plan="zero3", lowering="eager")
    h, mean = model(x.chunk(2)[rank])
    ((h * (rank + 1)).square().sum() + mean.sum()).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return h.detach(), mean.detach(), gradients


def test_a_rank_gets_its_rows_of_what_every_rank_computes():
    found = launch(train_bag, ranks=2)
    torch.manual_seed(0)
    x = torch.randn(14, 8)
    model = Bag()
    h, mean = model(x)
    own = [h.chunk(2)[rank] * (rank + 1) for rank in range(2)]
    (sum(one.square().sum() for one in own) / 2 + mean.sum()).backward()
    for rank, (rows_found, mean_found, gradients) in enumerate(found):
        torch.testing.assert_close(rows_found, h.chunk(2)[rank].detach())
        torch.testing.assert_close(mean_found, mean.detach())
        for name, value in gradients.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, msg=name)


class Spectral(nn.Module):
    """A complex weight of some frequencies."""

    def __init__(self, frequencies):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(frequencies, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=x.shape[-1])


def train_spectral(frequencies, plan):
    torch.manual_seed(0)
    x = torch.randn(8, 2 * frequencies - 2)
    model = Spectral(frequencies)
    if plan:
        example = (x,)
        model = stepgraph.parallelize(
            model, mesh="dp=2", example=example, plan=plan, lowering="eager"
        )
        x = x.chunk(2)[int(os.environ["RANK"])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.full_tensor().detach() if plan else model.weight.detach()


@pytest.mark.parametrize("frequencies, plan", [(6, "zero3"), (5, "ddp")])
def test_a_complex_parameter_is_trained(frequencies, plan):
    (found, _) = launch(train_spectral, frequencies, plan, ranks=2)
    torch.testing.assert_close(found, train_spectral(frequencies, ""))


def test_a_complex_parameter_that_torch_would_not_train_is_an_error():
    with pytest.raises(LaunchError, match="the complex parameter 'weight'"):
        launch(train_spectral, 5, "zero3", ranks=2)
