"""Tensors that a loss closes over, criteria and teachers outside the model, unregistered attributes."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.check import check_model
from stepgraph.errors import UsageError
from tests.sampling import sampled

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 4
GLOBAL = torch.tensor([1.0, 2.0, 3.0, 0.5])


class Centers(nn.Module):
    """A criterion with a buffer and a parameter that nobody learns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(-1, 1, 16).reshape(4, 4))
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, h, y):
        return ((h - self.centers[y]) * self.scale).square().mean()


class Anchored(nn.Module):
    """Has a tensor that is not registered, and a list of them."""

    def __init__(self):
        super().__init__()
        self.inner, self.anchor = nn.Linear(6, 4), torch.linspace(0, 1, 4)
        self.levels, self.pair = [torch.tensor(0.5)], (torch.tensor(2.0), 1)

    def forward(self, x):
        return self.inner(x) * self.anchor + self.levels[0] * self.pair[0]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def anchored():
    torch.manual_seed(0)
    return Anchored()


def weighted():
    weight = GLOBAL.clone()
    return lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight)


def criterion():
    own = nn.CrossEntropyLoss(weight=GLOBAL.clone(), label_smoothing=0.1)
    return lambda m, b: own(m(b[0]), b[1])


def centers():
    own = Centers()
    return lambda m, b: own(m(b[0]), b[1])


def teacher():
    torch.manual_seed(7)
    own = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).eval()

    def loss(m, b):
        with torch.no_grad():
            soft = own(b[0]).softmax(-1)
        return -(soft * m(b[0]).log_softmax(-1)).sum(-1).mean()

    return loss


def of_a_global():
    return lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * GLOBAL[b[1]]).mean()


def plain():
    return lambda m, b: F.cross_entropy(m(b[0]), b[1])


CASES = {
    "weighted": (model, weighted), "criterion": (model, criterion), "centers": (model, centers),
    "teacher": (model, teacher), "a global": (model, of_a_global), "attributes": (anchored, plain),
}  # fmt: skip
NAMES = {
    "weighted": "weight", "criterion": "own.weight", "centers": "own.scale, own.centers",
    "teacher": "own.0.weight, own.0.bias, own.1.weight, own.1.bias, own.1.running_mean and 3 more",
    "a global": "GLOBAL", "attributes": "anchor, levels.0, pair.0",
}  # fmt: skip


ON_MESHES = [("dp=2,tp=2", "tp+zero3"), ("dp=2", "auto")]


@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    sampled([(name, "dp=2", "zero3") for name in CASES], every=6)
    + sampled([(name, *on) for name in ("weighted", "teacher") for on in ON_MESHES], every=3),
)
def test_every_rank_reads_what_one_process_would(name, mesh, plan):
    make, loss = CASES[name]
    own = make()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
    options = {"loss": loss(), "optimizer": optimizer, "mesh": mesh, "plan": plan}
    report = check_model(own, batch=(X, Y), **options)
    assert report.ok, report


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_plain_pytorch(name):
    make, make_loss = CASES[name]
    own, loss = make(), make_loss()
    twin = copy.deepcopy(own)
    engine, optimizer = (f(own, loss) for f in (engine_of, lambda *_: sgd(twin)))
    for _ in range(3):
        assert_same_step(engine, twin, loss, optimizer)
    (note,) = [note for note in engine.notes if note.startswith("read from outside")]
    assert note.endswith(f": {NAMES[name]}") and note in engine.report()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def engine_of(own, loss, **options):
    return stepgraph.Engine(
        own, loss=loss, optimizer=sgd(own), plan="ddp", lowering="eager", strict=True, **options
    )


def assert_same_step(engine, twin, loss, optimizer):
    optimizer.zero_grad()
    expected = loss(twin, (X, Y))
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(engine.step((X, Y)), expected.detach())


def test_what_is_written_or_put_in_its_place_is_read_at_the_next_step():
    weight, holder = GLOBAL.clone(), Centers()

    def loss(m, b):
        h = m(b[0])
        return F.cross_entropy(h, b[1], weight=weight) + holder(h, b[1])

    own = model()
    twin = copy.deepcopy(own)
    engine, optimizer = engine_of(own, loss), sgd(twin)
    assert_same_step(engine, twin, loss, optimizer)
    with stepgraph.no_recompiles(after=0):
        weight.mul_(torch.tensor([0.1, 3.0, 1.0, 1.0]))
        assert_same_step(engine, twin, loss, optimizer)
        weight = torch.tensor([3.0, 0.0, 1.0, 2.0])
        holder.centers = torch.zeros(4, 4)
        with torch.no_grad():
            holder.scale.fill_(0.3)
        assert_same_step(engine, twin, loss, optimizer)
    torch.testing.assert_close(engine.evaluate((X, Y)), loss(twin, (X, Y)).detach())
    weight = torch.ones(5)
    with pytest.raises(UsageError, match=r"'weight'.*is \[5\] torch.float32 now"):
        engine.step((X, Y))


def test_micro_batches_and_the_split_use():
    loss = of_a_global()
    for micro_batches in (1, 2):
        own = model()
        twin = copy.deepcopy(own)
        engine, optimizer = engine_of(own, loss, micro_batches=micro_batches), sgd(twin)
        assert_same_step(engine, twin, loss, optimizer)
        if micro_batches == 1:
            torch.testing.assert_close(engine((X, Y)).detach(), loss(twin, (X, Y)).detach())


def test_a_parallelized_module_has_them_too():
    own = anchored()
    expected = own(X)
    expected.sum().backward()
    wanted = own.inner.weight.grad.clone()
    placed = stepgraph.parallelize(
        anchored(), mesh="dp=1", plan="zero3", example=(X,), lowering="eager"
    )
    found = placed(X)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    torch.testing.assert_close(placed.inner.weight.grad.full_tensor(), wanted)


def on_a_rank(differs):
    weight = GLOBAL.clone()
    own = model()
    engine = engine_of(own, lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))
    rank = torch.distributed.get_rank()
    rows = slice(rank * 4, rank * 4 + 4)
    losses = [float(engine.step((X[rows], Y[rows])))]
    weight.mul_(torch.tensor([1.0, 1.0, 4.0, 1.0 + (rank if differs else 0)]))
    losses.append(float(engine.step((X[rows], Y[rows]))))
    return losses


def test_real_ranks_read_the_same_and_say_where_they_differ():
    loss = weighted()
    twin = model()
    optimizer = sgd(twin)
    first = loss(twin, (X, Y))
    first.backward()
    optimizer.step()
    weight = GLOBAL * torch.tensor([1.0, 1.0, 4.0, 1.0])
    second = F.cross_entropy(twin(X), Y, weight=weight)
    for losses in launch(on_a_rank, False, ranks=2):
        assert losses == pytest.approx([first.item(), second.item()], rel=1e-5)
    with pytest.raises(Exception, match="'weight'.*differs between ranks"):
        launch(on_a_rank, True, ranks=2)


class Teacher(nn.Module):
    def __init__(self, value=0.5):
        super().__init__()
        self.head, self.drop = nn.Linear(6, 4), nn.Dropout(0.0)
        with torch.no_grad():
            self.head.weight.fill_(value)

    def forward(self, x):
        h = self.head(x)
        return h * 2 if self.training else h


class Holder:
    def __init__(self):
        self.teacher, self.table = Teacher(), {"p": GLOBAL.clone()}
        self.table["q"] = self.table["p"]
        self.listed, self.index = [GLOBAL.clone(), GLOBAL + 1], 1

    def loss(self, model, batch):
        soft = (model(batch[0]) - self.teacher(batch[0]).detach()).square()
        h = soft * self.table["p"] + soft * self.table["q"].flip(0)
        return (h * self.listed[self.index]).mean()


def averaged(h):
    for p in h.teacher.parameters():
        p.data.mul_(0.5)


def of_two(h):
    h.table["q"] = GLOBAL * 3


def another_teacher(h):
    h.teacher = Teacher(-1.0)


def another_list(h):
    h.listed = [GLOBAL * 7, GLOBAL * 0.1]


def another_index(h):
    h.index = 1 - h.index


@pytest.mark.parametrize(
    "change",
    [averaged, of_two, another_teacher, another_list, another_index, lambda h: h.teacher.eval()],
)
def test_whatever_changes_on_the_way_to_a_tensor_is_seen(change):
    holder, own = Holder(), model()
    twin = copy.deepcopy(own)
    engine, optimizer = engine_of(own, holder.loss), sgd(twin)
    assert_same_step(engine, twin, holder.loss, optimizer)
    change(holder)
    assert_same_step(engine, twin, holder.loss, optimizer)
    if change is another_index:
        change(holder)
        assert_same_step(engine, twin, holder.loss, optimizer)


@pytest.mark.parametrize("alias", [lambda p: p, lambda p: p.detach(), lambda p: p[:2]])
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_the_models_own_parameters_from_before_are_an_error_that_names_them(alias, plan):
    own = model()
    held = alias(own[0].weight)
    engine = stepgraph.Engine(
        own, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]) + held.square().sum(),
        optimizer=sgd(own), plan=plan, lowering="eager",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"parameter '0\.weight', as it was before"):
        engine.step((X, Y))


def test_something_else_than_a_tensor_is_an_error():
    holder, own = {"w": GLOBAL.clone()}, model()
    engine = engine_of(own, lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=holder["w"]))
    engine.step((X, Y))
    holder["w"] = 2.0
    with pytest.raises((UsageError, TypeError), match="no tensor now|weight"):
        engine.step((X, Y))


class Region(nn.Module):
    """Writes a buffer in a checkpointed region."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def follow(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.inner(x + self.mean)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.follow, x, use_reentrant=False)


def test_a_plan_says_what_an_engine_says():
    weights, x = torch.ones(4), torch.randn(8, 4)

    def loss(m, x):
        return (m(x) * weights).square().mean()

    said = ("read from outside model and batch", "written under torch.utils.checkpoint")
    made = stepgraph.plan(Region(), example=x, loss=loss, mesh="dp=2", compute_dtype=None)
    engine = stepgraph.Engine(Region(), loss=loss, lowering="eager")
    engine.step(x)
    for part in said:
        (told,) = (note for note in engine.notes if part in note)
        assert told in made.notes
        assert all(" ".join(text.split()).count(part) == 1 for text in (made.report(), str(made)))
