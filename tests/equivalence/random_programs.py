"""Random small modules, batches and ways to run them, and what plain PyTorch makes of them.

Everything is in float64: other orders of summation differ by 1e-13 of a result, mistakes by 1e-6 and
more, and discontinuous operations (sort, relu) do not take another branch because of rounding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from stepgraph.runtime.ranks import parse_mesh
from tests.equivalence.random_layers import DRAWS, LAYERS, Residual
from tests.one_process import OneProcessRun
from tests.support import notes_of

RATE, STEPS, CLASSES, IGNORED, DIVERGED = 0.05, 2, 5, -100, 1e4
# 256 eps for sums (see equivalence.check.tolerance); what a step is off by, the layers behind it and
# the second step multiply by no more than a thousand.
TOLERANCE = 1000 * 256 * torch.finfo(torch.float64).eps
DATA = ["ddp", "zero1", "zero2", "zero3"]
BOTH = ["tp", "tp+zero1", "tp+zero2", "zero3", "tp+sp", "tp+sp+zero1", "tp+sp+zero3"]
HYBRID = ["hsdp", "tp+hsdp", "tp+sp+hsdp"]
CELLS = [
    *[(f"dp={ranks}", plan) for ranks in range(1, 9) for plan in DATA],
    *[(mesh, p) for mesh in ("dp=2,tp=2", "tp=2,dp=3", "dp=2,tp=4", "dp=4,tp=2") for p in BOTH],
    *[(f"tp={ranks}", plan) for ranks in (2, 3, 4, 8) for plan in ("tp", "tp+sp")],
    *[(f"replicate={r},shard={s}", "hsdp") for r, s in ((2, 2), (3, 2), (2, 4), (4, 2), (1, 3))],
    *[("shard=2,replicate=2", "hsdp")],
    *[(mesh, p) for mesh in ("replicate=2,shard=2,tp=2", "tp=2,replicate=2,shard=2") for p in HYBRID],
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A module, a batch, and a way to run them.

    ``layers``: (name, inside a residual) pairs. ``first``: tokens (an embedding, whose row 0 is
    padding), tied (the output projection is that embedding), linear, or nothing. ``loss``: tokens
    (mean cross entropy with ignored labels), mean, sum, or count (a sum over a count of weights).
    """

    layers: tuple[tuple[str, bool], ...]
    first: str = "linear"
    loss: str = "mean"
    mesh: str = "dp=2"
    plan: str = "ddp"
    memory: str = "none"
    micro_batches: int = 1
    clip: float | None = None
    width: int = 8
    length: int = 4
    vocabulary: int = 16
    rows_each: int = 1
    seed: int = 0

    @property
    def rows(self) -> int:
        return parse_mesh(self.mesh).data_size * self.micro_batches * self.rows_each

    @property
    def draws(self) -> bool:
        return any(name in DRAWS for name, _ in self.layers)


def cases() -> st.SearchStrategy[Case]:
    layer = st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans())
    return st.builds(
        lambda cell, **rest: Case(mesh=cell[0], plan=cell[1], **rest),
        cell=st.sampled_from(CELLS),
        layers=st.lists(layer, min_size=1, max_size=4).map(tuple),
        first=st.sampled_from(["linear", "tokens", "tied", "nothing"]),
        loss=st.sampled_from(["mean", "sum", "count", "tokens"]),
        memory=st.sampled_from(["none", "full"]),
        micro_batches=st.sampled_from([1, 2]),
        clip=st.sampled_from([None, 0.3]),
        width=st.sampled_from([6, 8]),
        length=st.sampled_from([2, 3, 4, 5]),
        vocabulary=st.sampled_from([11, 16]),
        rows_each=st.sampled_from([1, 2]),
        seed=st.integers(0, 99),
    )


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        tokens = case.first in ("tokens", "tied")
        self.first: nn.Module = nn.Identity()
        if tokens:
            self.first = nn.Embedding(case.vocabulary, case.width, padding_idx=0)
        elif case.first == "linear":
            self.first = nn.Linear(case.width, case.width)
        made = [(LAYERS[name](case.width, case.length), inside) for name, inside in case.layers]
        self.layers = nn.Sequential(
            *(Residual(layer) if inside else layer for layer, inside in made)
        )
        self.head = nn.Linear(case.width, case.vocabulary if tokens else CLASSES)
        if case.first == "tied":
            self.head.weight = self.first.weight

    def forward(self, x, y, weight, labels):
        logits = self.head(self.layers(self.first(x)))
        if self.case.loss == "tokens":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        error = (logits[..., :CLASSES] - y).square()
        if self.case.loss == "mean":
            return error.mean()
        if self.case.loss == "sum":
            return error.sum() / 100
        return (error.mean(2) * weight).sum() / weight.sum().clamp(min=1)


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    model = Model(case).double()
    with torch.no_grad():  # no parameter at a point of symmetry
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def make_batch(case: Case, step: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1000 * step + case.seed)
    shape = (case.rows, case.length)
    x = torch.randn(*shape, case.width, generator=random, dtype=torch.float64)
    if case.first in ("tokens", "tied"):
        x = torch.randint(case.vocabulary, shape, generator=random)
    y = torch.randn(*shape, CLASSES, generator=random, dtype=torch.float64)
    weight = (torch.rand(shape, generator=random) > 0.4).double()
    labels = torch.randint(CLASSES, shape, generator=random)
    labels[torch.rand(shape, generator=random) > 0.7] = IGNORED
    labels[0, 0] = 1
    return x, y, weight, labels


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def run_case(case: Case, **changed) -> tuple[OneProcessRun, list[torch.Tensor]]:
    """The run, and its losses; arguments of OneProcessRun may be changed."""
    model = make_model(case)
    options = {
        "mesh": case.mesh,
        "plan": case.plan,
        "memory": case.memory,
        "micro_batches": case.micro_batches,
        "max_grad_norm": case.clip,
    }
    run = OneProcessRun(model, optimizer=sgd(model), **(options | changed))
    return run, [run.step(make_batch(case, step)) for step in range(STEPS)]


def micro_batches_of(case: Case, batch: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
    """Micro-batch i: the i-th slice of every rank's part, in rank order."""
    ranks, count = parse_mesh(case.mesh).data_size, case.micro_batches
    sliced = [tensor.unflatten(0, (ranks, count, -1)) for tensor in batch]
    return [[tensor[:, i].flatten(0, 1) for tensor in sliced] for i in range(count)]


def run_plainly(case: Case, whole: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, and final parameters and buffers, of plain PyTorch.

    ``whole``: the loss of the whole batch; else the mean over micro-batches. Buffers are written by
    one micro-batch after another in both.
    """
    model = make_model(case)
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        batch = make_batch(case, step)
        pieces = micro_batches_of(case, batch)
        optimizer.zero_grad()
        before = copy.deepcopy(dict(model.named_buffers()))
        per_piece = []
        for piece in pieces:
            loss = model(*piece) / len(pieces)
            per_piece.append(loss.detach())
            if not whole or len(pieces) == 1:
                loss.backward()
        losses.append(sum(per_piece))
        if whole and len(pieces) > 1:
            after = copy.deepcopy(dict(model.named_buffers()))
            _set_buffers(model, before)
            loss = model(*batch)
            loss.backward()
            losses[-1] = loss.detach()
            _set_buffers(model, after)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return losses, {name: tensor.detach() for name, tensor in tensors.items()}


def _set_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def product_flops(run: OneProcessRun) -> int:
    """FLOPs of one rank's matrix products and convolutions in one step."""
    total = 0
    for name, program in run.programs.items():
        times = run.plan.request.step.micro_batches - 1 if name == "accumulate" else 1
        for node in program.operations():
            count = flop_registry.get(getattr(node.target, "overloadpacket", None))
            if count is None:
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
            total += times * count(*args, **kwargs, out_val=node.meta["val"])
    return total


def check_case(case: Case) -> None:
    """Asserts that a run gives what one process gives, and divides the products."""
    run, losses = run_case(case)
    assert run.captured is not None
    normalisation = run.captured.normalisation
    whole = normalisation is None or normalisation.exact
    if not case.draws:
        expected_losses, expected = run_plainly(case, whole)
    elif whole:  # one mask, whatever the micro-batches
        alone, expected_losses = run_case(
            case, mesh="dp=1", plan="ddp", memory="none", micro_batches=1
        )
        expected = alone.parameters()  # buffers are written once a micro-batch
    else:
        same, expected_losses = run_case(
            case, mesh=f"dp={parse_mesh(case.mesh).data_size}", plan="ddp", memory="none"
        )
        expected = same.parameters() | same.buffers()
    if not all(abs(loss) < DIVERGED for loss in expected_losses):
        return  # a run that blows up multiplies rounding without bound
    torch.testing.assert_close(losses, expected_losses, rtol=TOLERANCE, atol=TOLERANCE)
    found = run.parameters() | run.buffers()
    assert run.parameters().keys() <= expected.keys()
    for name in found.keys() & expected.keys():
        value, wanted = found[name], expected[name]
        if not value.is_floating_point():
            assert torch.equal(value, wanted), name
            continue
        difference = (value - wanted).abs().max().item()
        assert difference <= TOLERANCE * max(1.0, wanted.abs().max().item()), (name, difference)
    check_products_are_divided(case, run)


def check_products_are_divided(case: Case, run: OneProcessRun) -> None:
    """Under data parallelism alone, unless a note says that an operation is replicated."""
    mesh = parse_mesh(case.mesh)
    if "tp" in mesh.names or any("is replicated" in note for note in notes_of(run)):
        return
    with FlopCounterMode(display=False) as counter:
        make_model(case)(*make_batch(case, 0)).backward()
    repeated = 2 if case.memory == "full" else 1  # a recomputed product runs once more
    each, whole = product_flops(run), counter.get_total_flops()
    assert each * mesh.data_size <= whole * repeated, (each, whole)
