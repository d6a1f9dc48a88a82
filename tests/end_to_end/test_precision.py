"""compute_dtype and reduce_dtype: half the bytes travel, masters stay fp32."""

import copy
import functools
import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.step import Captured
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.check import check_model
from stepgraph.errors import UsageError
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import Precision
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.mesh_cells import BF16_RATE, compare_in_bf16
from tests.end_to_end.training import adamw, llama_batch, tiny_llama
from tests.one_process import OneProcessRun
from tests.sampling import sampled

BF16 = Precision(torch.bfloat16)
STEPS = 5
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
# Eight roundings of bf16, which has 8 bits, on a loss of about 4.6; see equivalence.check.tolerance.
LOSS_TOLERANCE = 8 * torch.finfo(torch.bfloat16).eps


captured: dict[tuple[Precision, int, bool], Captured] = {}


@functools.cache
def traffic(preset, precision, mesh="dp=2", micro_batches=1):
    """(program, kind) -> bytes that collectives on matrices carry."""
    model = tiny_llama(layers=1)
    accumulates_reduced = reduces_each_micro_batch(preset, parse_mesh(mesh))
    key = (precision, micro_batches, accumulates_reduced)
    run = OneProcessRun(
        model,
        optimizer=adamw(model.parameters()),
        mesh=mesh,
        plan=preset_plan(preset, parse_mesh(mesh), schedule="none"),
        precision=precision,
        micro_batches=micro_batches,
        captured=captured.get(key),
    )
    run.step(llama_batch(0))
    captured[key] = run.captured
    found = {}
    for name, program in run.programs.items():
        for node in program.operations():
            value = node.meta["val"]
            if is_collective(node) and value.dim() > 1:
                key = name, KINDS[node.target]
                size = max(value.numel(), node.args[0].meta["val"].numel())
                found[key] = found.get(key, 0) + size * value.element_size()
    return found


@pytest.mark.parametrize("preset", sampled(["ddp", "zero3"]))
@pytest.mark.slow
def test_bf16_halves_the_traffic(preset):
    whole, half = traffic(preset, Precision()), traffic(preset, BF16)
    assert whole.keys() == half.keys()
    assert all(half[key] * 2 == size for key, size in whole.items())


@pytest.mark.parametrize("preset", sampled(["ddp", "zero3", "zero2"], every=3))
def test_gradients_are_reduced_in_the_type_asked_for(preset):
    kind = ("step", "all_reduce" if preset == "ddp" else "reduce_scatter")
    whole = traffic(preset, Precision())[kind]
    assert traffic(preset, Precision(torch.bfloat16, torch.float32))[kind] == whole
    assert traffic(preset, Precision(None, torch.bfloat16))[kind] == whole / 2


@pytest.mark.parametrize("preset", sampled(["ddp", "zero3", "zero1", "zero2"], every=4))
def test_micro_batches_travel_in_bf16_too(preset):
    whole = traffic(preset, Precision(), micro_batches=2)
    half = traffic(preset, BF16, micro_batches=2)
    for key, size in whole.items():
        masters = preset in ("zero1", "zero2") and key[1] == "all_gather"  # new parameters, fp32
        assert half[key] == (size if masters else size / 2), key


@pytest.mark.parametrize(
    ("plan", "mesh", "micro_batches"),
    [
        pytest.param("ddp", "dp=2", 1, marks=pytest.mark.slow),
        pytest.param("ddp", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("zero1", "dp=2", 2, marks=pytest.mark.slow),
        pytest.param("zero2", "dp=2", 2, marks=pytest.mark.slow),
        ("zero3", "dp=2", 1),
        pytest.param("tp+zero3", "dp=2,tp=2", 2, marks=pytest.mark.slow),
        pytest.param("hsdp", "replicate=2,shard=2", 2, marks=pytest.mark.slow),
    ],
)
def test_every_pass_keeps_the_result(plan, mesh, micro_batches):
    model = tiny_llama(layers=1, vocabulary=104)
    report = check_model(
        model,
        entries=("step",),
        optimizer=adamw(model.parameters()),
        batch=llama_batch(0),
        mesh=mesh,
        plan=plan,
        memory="full",
        micro_batches=micro_batches,
        max_grad_norm=0.5,
        precision=BF16,
    )
    assert report.ok, str(report)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reference(optimizer_of=adamw):
    """Plain PyTorch: a bf16 copy computes, its gradients update the fp32 masters."""
    masters = tiny_llama()
    optimizer = optimizer_of(masters.parameters())
    losses = []
    for step in range(STEPS):
        worker = copy.deepcopy(masters)
        for parameter in worker.parameters():
            parameter.data = parameter.data.bfloat16()
        loss = worker(**llama_batch(step)).loss
        loss.backward()
        for master, parameter in zip(masters.parameters(), worker.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in masters.named_parameters()}


def train(plan, lowering, optimizer_of=adamw):
    """One rank of a run; returns losses and whole parameters."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = tiny_llama()
    engine = stepgraph.Engine(
        model,
        optimizer=optimizer_of(model.parameters()),
        plan=plan,
        lowering=lowering,
        compute_dtype=torch.bfloat16,
    )
    losses = []
    for step in range(STEPS):
        part = {k: v.chunk(ranks)[rank] for k, v in llama_batch(step).items()}
        losses.append(engine.step(part).item())
    evaluated = engine.evaluate({k: v.chunk(ranks)[rank] for k, v in llama_batch(0).items()})
    assert torch.isfinite(evaluated)
    parameters = {n: p.detach().full_tensor() for n, p in engine.model.named_parameters()}
    return losses, parameters


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "lowering"), [("zero3", "eager"), ("zero1", "inductor")])
def test_real_ranks_train_as_plain_pytorch_does(plan, lowering):
    expected_losses, expected = reference()
    for losses, parameters in launch(train, plan, lowering, ranks=2):
        assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE)
        for name, value in parameters.items():
            assert value.dtype == torch.float32
            # Adam moves an entry by at most the learning rate a step, either way.
            assert (value - expected[name]).abs().max() <= 2 * STEPS * 1e-3


def test_one_process_computes_what_plain_pytorch_does():
    # SGD: Adam divides by what a gradient is large, and an entry that is all rounding weighs as the others.
    expected_losses, expected = reference(sgd)
    losses, parameters = train("ddp", "eager", sgd)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


class UnderAutocast(nn.Module):
    """A model that asks for mixed precision itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(**batch)


def loss_under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


def under_autocast(inside):
    """A model and its loss, one of which is under autocast."""
    model = tiny_llama(layers=1, vocabulary=104)
    return (UnderAutocast(model), None) if inside == "model" else (model, loss_under_autocast)


@pytest.mark.parametrize(
    ("plan", "mesh", "inside"),
    sampled(
        [
            (*on, inside)
            for on in (("zero3", "dp=2"), ("tp", "tp=2"))
            for inside in ("model", "loss")
        ],
        every=4,
    ),
)
def test_autocast_trains_as_in_one_process(inside, plan, mesh):
    plain, loss = under_autocast(inside)
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=BF16_RATE)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(plain, llama_batch(step)) if loss else plain(**llama_batch(step)).loss
        value.backward()
        optimizer.step()
        expected.append(value.item())
    model, loss = under_autocast(inside)
    run = OneProcessRun(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=BF16_RATE),
        mesh=mesh,
        plan=plan,
    )
    losses = [run.step(llama_batch(step)).item() for step in range(STEPS)]
    products = [
        node
        for node in run.programs["step"].operations()
        if node.target is torch.ops.aten.mm.default
    ]
    assert products
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in products)
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    compare_in_bf16((losses, run.parameters()), (expected, wanted), start)


@pytest.mark.slow
def test_a_model_that_is_bf16_itself():
    model = tiny_llama(layers=1).bfloat16()
    plain = model(**llama_batch(0)).loss
    report = check_model(
        model,
        entries=("step",),
        optimizer=adamw(model.parameters()),
        batch=llama_batch(0),
        mesh="dp=2",
        plan="zero3",
    )
    assert report.ok, str(report)
    run = OneProcessRun(model, mesh="dp=2", plan="zero3")
    assert run.step(llama_batch(0)).item() == pytest.approx(plain.item(), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("argument", ["compute_dtype", "reduce_dtype"])
def test_a_type_that_is_none_is_an_error(argument):
    with pytest.raises(UsageError, match=f"{argument} must be a floating-point"):
        stepgraph.Engine(tiny_llama(), **{argument: torch.int32})
