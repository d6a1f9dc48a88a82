"""Parts of a parallelized module on their own, and modules that are converted after they were placed."""

import copy
import os

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import CaptureError, StrictError, UsageError
from stepgraph.graphwise.parts import ON_THEIR_OWN
from tests.sampling import sampled

ROWS, WORDS = 8, 11
PLANS = [
    ("ddp", "dp=2", {}), ("zero3", "dp=2", {}), ("zero2", "dp=2", {}), ("tp+zero3", "dp=1,tp=2", {}),
    ("hsdp", "replicate=1,shard=2", {}), ("zero3", "dp=2", {"whole": False}),
]  # fmt: skip


class Net(nn.Module):
    """Tied words, a parameter of its own, layers in a list, a recurrent one, a body and a head."""

    def __init__(self, whole=True):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.ReLU())
        self.head = nn.Linear(7, 5)
        self.whole = whole

    def block(self, layer, x):
        return layer(x).tanh() * self.scale

    def encode(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(self.block, layer, x, use_reentrant=False)
            if not self.whole:
                torch._dynamo.graph_break()
        return self.recurrent(x)[0]

    def scores(self, x):
        return x @ self.words.weight.t()

    def forward(self, ids):
        return self.head(self.body(self.encode(ids)))

    def penalty(self):
        return self.scale.square().sum()

    def overwrite(self, x):
        with torch.no_grad():
            self.scale.copy_(x)

    def by_hand(self, x):
        return x * self._parameters["scale"]

    def reset(self):
        nn.init.ones_(self.scale)


def ids():
    return torch.randint(0, WORDS, (ROWS, 3), generator=torch.Generator().manual_seed(1))


LOSSES = [
    lambda m, x: m.encode(x).square().mean(),
    lambda m, x: m.head(m.body(m.encode(x))).square().mean(),
    lambda m, x: m.layers[0](torch.ones(x.shape[0], 6) + x[:, :1]).square().mean(),
    lambda m, x: m.scores(m.encode(x)).logsumexp(-1).mean(),
    lambda m, x: m.body[0].forward(torch.ones(x.shape[0], 6) * x[:, :1]).square().mean(),
    lambda m, x: m(x).square().mean() + m.encode(x).sum(-1).mean(),
]


def trained(model, part):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for loss in LOSSES:
        optimizer.zero_grad()
        value = loss(model, part(ids()))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    with torch.no_grad():
        return losses, model.scores(model.encode(part(ids())))


def parallel(plan="ddp", mesh="dp=1", whole=True, **options):
    options = {"lowering": "eager", **options}
    return stepgraph.parallelize(Net(whole), mesh=mesh, plan=plan, example=(ids(),), **options)


def whole_of(model):
    named = model.named_parameters()
    parts = {name: p.detach() for name, p in named}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parts.items()}


def parts_of_modules():
    found, rank = [], int(os.environ["RANK"])
    for plan, mesh, options in PLANS:
        part = (lambda x: x.chunk(2)[rank]) if mesh == "dp=2" or "shard" in mesh else (lambda x: x)
        model = parallel(plan, mesh, **options)
        losses, last = trained(model, part)
        stored = [p.placements for p in model.parameters() if p.dim()]
        found.append((plan, mesh, losses, last, whole_of(model), stored))
    return found


@pytest.mark.slow
def test_parts_train_as_in_one_process_under_any_plan():
    plain = Net()
    losses, last = trained(plain, lambda x: x)
    by_rank = launch(parts_of_modules, ranks=2)
    for one, two in zip(*by_rank, strict=True):
        plan, mesh, *_, parameters, stored = one
        for name, value in whole_of(plain).items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6, msg=plan)
        if mesh == "dp=2":
            torch.testing.assert_close(torch.cat([one[3], two[3]]), last, rtol=1e-4, atol=1e-5)
        for i, wanted in enumerate(losses):
            torch.testing.assert_close((one[2][i] + two[2][i]) / 2, wanted, rtol=1e-4, atol=1e-6)
        if plan.startswith("zero"):
            assert all(placements == (Shard(0),) for placements in stored)


def engine_of(whole=True, plan="ddp", mesh="dp=1", **options):
    model = Net(whole)
    return stepgraph.Engine(
        model, loss=lambda m, x: m(x).square().mean(), mesh=mesh, plan=plan, lowering="eager",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options,
    )  # fmt: skip


def parts_of_an_engine():
    found, rank = [], int(os.environ["RANK"])
    for plan, mesh, options in PLANS:
        part = (lambda x: x.chunk(2)[rank]) if mesh == "dp=2" or "shard" in mesh else (lambda x: x)
        engine = engine_of(plan=plan, mesh=mesh, **options)
        for loss in (*LOSSES, *LOSSES):
            engine.step(part(ids()))
            engine.backward(loss(engine.model, part(ids())))
            engine.optimizer_step()
        with torch.no_grad():
            last = engine.model(part(ids()))
        found.append((plan, last, engine.evaluate(part(ids())), whole_of(engine.model)))
        assert engine.notes.count(ON_THEIR_OWN) == 1
    return found


@pytest.mark.slow
def test_an_engines_parts_train_as_in_one_process_between_its_steps():
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for loss in (*LOSSES, *LOSSES):
        for one in (lambda m, x: m(x).square().mean(), loss):
            optimizer.zero_grad()
            one(plain, ids()).backward()
            optimizer.step()
    for plan, last, evaluated, parameters in launch(parts_of_an_engine, ranks=2)[0]:
        for name, value in whole_of(plain).items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6, msg=plan)
        whole = plain(ids()).detach()
        torch.testing.assert_close(last, whole[: len(last)], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(evaluated, whole.square().mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("whole", sampled([True, False]))
def test_an_engines_model_is_saved_copied_and_looked_through_as_the_users_own(whole, tmp_path):
    engine = engine_of(whole)
    engine.step(ids())
    shown = engine.model.encode(ids())
    kinds = []
    engine.model.apply(lambda module: kinds.append(type(module) is nn.Linear))
    assert sum(kinds) == 4 or not whole  # graph by graph they have classes of their own anyway
    twin = copy.deepcopy(engine.model)
    torch.testing.assert_close(twin.encode(ids()), shown)
    report = stepgraph.check(engine, ids())
    assert report.ok, report
    if whole:
        torch.save(engine.model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert type(loaded) is Net and type(loaded.layers[0]) is nn.Linear
    engine.step(ids())
    assert engine.stats.recompiles == []


def test_between_calls_the_parameters_are_what_they_were():
    model = parallel()
    model.encode(ids())
    assert isinstance(model.scale, DTensor) and isinstance(model.penalty(), DTensor)
    assert isinstance(model, Net) and type(model.layers[0]).__name__ == "Linear"
    model.reset()
    assert torch.equal(model.scale.full_tensor(), torch.ones(6))
    plain = Net()
    plain.load_state_dict(whole_of(model))
    torch.testing.assert_close(model.encode(ids()), plain.encode(ids()))
    torch.testing.assert_close(model(ids()), plain(ids()))
    assert model.forward.compiler.stats.compiles == 1


def test_that_parts_were_called_is_said_once():
    model = parallel()
    for _ in range(2):
        model.encode(ids())
    assert model.forward.compiler.notes.count(ON_THEIR_OWN) == 1
    with pytest.raises(StrictError, match="parts of the module"):
        parallel(strict=True).encode(ids())


def test_what_a_part_cannot_do_is_an_error_that_says_what_to_do():
    model = parallel()
    with pytest.raises(CaptureError, match="writes into a parameter"):
        model.overwrite(torch.ones(6))
    with pytest.raises(CaptureError, match="reads a parameter in parts") as raised:
        model.by_hand(torch.ones(6))
    assert "_parameters" in str(raised.value) and "test_parts.py" in raised.value.where


# -------------------------------------------------------------------------------------- conversions


class Small(nn.Module):
    def __init__(self, between=lambda x: x, whole=True, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), norm(6), nn.Linear(6, 3)
        self.between, self.whole = between, whole

    def forward(self, x):
        x = self.norm(self.first(x))
        if not self.whole:
            torch._dynamo.graph_break()
        return self.last(self.between(x))


def converted():
    found, rank = [], int(os.environ["RANK"])
    for plan in ("ddp", "zero3"):
        for captured_whole in (True, False):
            for dtype in (torch.float64, torch.bfloat16):
                x = torch.linspace(-1, 1, 48).view(8, 6)
                model = stepgraph.parallelize(
                    Small(whole=captured_whole),
                    mesh="dp=2",
                    plan=plan,
                    example=(x,),
                    lowering="eager",
                )
                model(x.chunk(2)[rank])
                model.to(dtype)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    optimizer.zero_grad()
                    model(x.chunk(2)[rank].to(dtype)).square().mean().backward()
                    optimizer.step()
                values = whole_of(model)
                assert {p.grad.dtype for p in model.parameters()} == {dtype}
                found.append((captured_whole, dtype, values, model.norm.running_mean))
    return found


@pytest.mark.slow
def test_a_module_may_be_converted_after_it_was_placed():
    for captured_whole, dtype, values, seen in launch(converted, ranks=2)[0]:
        assert {value.dtype for value in values.values()} == {dtype} == {seen.dtype}
        if not captured_whole:
            continue  # batch norm has a rank's own rows then
        plain, x = Small(), torch.linspace(-1, 1, 48).view(8, 6)
        plain(x)
        plain.to(dtype)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            plain(x.to(dtype)).square().mean().backward()
            optimizer.step()
        tolerance = 0.03 if dtype == torch.bfloat16 else 1e-6
        for name, value in whole_of(plain).items():
            torch.testing.assert_close(
                values[name], value, rtol=tolerance, atol=tolerance, msg=name
            )


def test_a_conversion_is_a_recompilation_and_an_engines_state_would_not_follow():
    x = torch.ones(4, 6)
    model = stepgraph.parallelize(Small(), example=(x,), plan="ddp", lowering="eager")
    model(x).sum().backward()
    model.zero_grad()
    model.double()
    model(x.double()).sum().backward()
    assert "converted to another type" in model.forward.compiler.stats.recompiles[0]
    model = Small()
    engine = stepgraph.Engine(
        model, loss=lambda m, b: m(b).sum(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan="ddp", lowering="eager",
    )  # fmt: skip
    engine.step(x)
    model.double()
    with pytest.raises(UsageError, match="converted or moved after the first step"):
        engine.step(x.double())


@pytest.mark.parametrize("whole", [True, False])
def test_two_types_under_compute_dtype_are_an_error_that_names_the_line(whole):
    x = torch.ones(4, 6)
    with pytest.raises(
        CaptureError, match="two types together under compute_dtype=bfloat16"
    ) as raised:
        model = stepgraph.parallelize(
            Small(torch.Tensor.float, whole, nn.LayerNorm), example=(x,), plan="ddp", lowering="eager",
            compute_dtype=torch.bfloat16,
        )  # fmt: skip
        model(x)
    assert "last" in raised.value.where and "test_parts.py" in raised.value.where
    assert "bfloat16 and float32" in raised.value.why


def test_a_cast_between_parts_is_cast_back():
    x = torch.ones(4, 6)
    model = stepgraph.parallelize(
        Small(norm=nn.LayerNorm), example=(x,), plan="ddp", lowering="eager",
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    y = model.last(model.norm(model.first(x)).float())
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and model.first.weight.grad.dtype == torch.float32
