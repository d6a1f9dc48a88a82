"""Checkpoints of real ranks: from any mesh and preset to any other, and when one rank fails."""

import os
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import CheckpointError
from stepgraph.program.layout import MeshShape
from stepgraph.runtime.ranks import parse_mesh
from tests.runtime.test_checkpoint import adagrad, everything, sgd, two_groups
from tests.support import mlp, regression_batch

VOCABULARY = 104  # divides over 2 and 4 ranks
OPTIMIZERS = {"sgd": sgd, "two_groups": two_groups, "adagrad": adagrad}
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


class Pair(nn.Module):
    """Two products that tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, y, weight):
        return (self.second(torch.tanh(self.first(x))) - y).square().mean()


class Position:
    """A data loader's: where it is."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make(kind, plan, mesh, optimizer, seed=0):
    """An engine, and how it steps: losses of so many steps on this rank's part of the batch."""
    shape = parse_mesh(mesh) if mesh else MeshShape((("dp", 1),))
    rank = shape.data_rank(dist.get_rank() if dist.is_initialized() else 0)
    if kind == "llama":  # imported where it is used: four ranks would each import transformers
        from tests.end_to_end.training import llama_batch, tiny_llama

        model, batch = tiny_llama(vocabulary=VOCABULARY), llama_batch(0)
        part = {name: t.chunk(shape.data_size)[rank] for name, t in batch.items()}
    else:
        torch.manual_seed(seed)
        model = Pair() if kind == "pair" else mlp(seed=seed)
        part = tuple(t.chunk(shape.data_size)[rank] for t in regression_batch())
    engine = stepgraph.Engine(
        model, optimizer=OPTIMIZERS[optimizer](model), plan=plan, mesh=mesh, lowering="eager"
    )
    return engine, lambda count: [engine.step(part).item() for _ in range(count)]


def save(folder, kind, plan, mesh, optimizer):
    """Two steps, a save, and what was saved beside it; then on, with a save in the background."""
    engine, step = make(kind, plan, mesh, optimizer)
    step(2)
    rank = dist.get_rank()
    engine.save(f"{folder}/a", extra={"same": Position(7), "own": Position(rank)})
    saved = everything(engine)
    if rank == 0:
        torch.save(saved, f"{folder}/saved.pt")
    step(1)
    engine.save(f"{folder}/b", wait=False)
    losses = step(3)
    engine.wait_for_save()
    new, step = make(kind, plan, mesh, optimizer)
    same, own = Position(0), Position(-1)
    new.load(f"{folder}/a", extra={"same": same, "own": own})
    parts = parse_mesh(mesh).data_size
    assert (same.at, own.at) == (7, rank), parts
    assert step(4)[1:] == losses
    new.load(f"{folder}/b")  # after steps
    assert new.stats.steps == 3
    assert step(3) == losses
    return losses


def load(folder, kind, plan, mesh, optimizer):
    """Loads before the first step, and again after one; everything is what was saved."""
    engine, step = make(kind, plan, mesh, optimizer, seed=5)
    saved = torch.load(f"{folder}/saved.pt")
    same, own = Position(0), Position(0)
    for _ in range(2):
        engine.load(f"{folder}/a", extra={"same": same})
        found = everything(engine)
        assert found.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(found[name], value), name
        losses = step(2)
    assert same.at == 7
    with pytest.raises(CheckpointError, match="extra 'own' .* differs between the"):
        engine.load(f"{folder}/a", extra={"own": own})
    placed = {name: str(tuple(p.placements)) for name, p in engine.model.named_parameters()}
    engine.save(f"{folder}/{plan}.safetensors")
    return losses, placed


def close(losses, others):
    return all(abs(a - b) < 1e-4 * abs(a) for a, b in zip(losses, others, strict=True))


def on_two_ranks(folder):
    """All that two ranks are needed for, in one launch: starting them takes longest."""
    told = fail_on_one_rank(_new(folder, "failing"))
    there = _new(folder, "pair")
    save(there, "pair", "zero3", "dp=2", "two_groups")
    placed = load(there, "pair", "tp", "tp=2", "two_groups")[1]
    return save(_new(folder, "mlp"), "mlp", "zero3", "dp=2", "two_groups"), placed, told


def _new(folder, name):
    os.makedirs(folder / name, exist_ok=True)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return launch(on_two_ranks, folder, ranks=2)


def test_two_ranks_to_one(folder, two_ranks):
    losses, _, _ = two_ranks[0]
    alone, _ = load(folder / "mlp", "mlp", "ddp", None, "two_groups")
    assert close(alone[1:], losses[:1])


@pytest.mark.slow
def test_two_ranks_to_four(folder, two_ranks):
    losses, _, _ = two_ranks[0]
    for others, placed in launch(
        load, folder / "mlp", "mlp", "zero1", "dp=4", "two_groups", ranks=4
    ):
        assert close(others[1:], losses[:1])
        assert "Shard" not in placed["first.weight"]


def test_zero3_goes_into_tensor_parallelism(two_ranks):
    for _, placed, _ in two_ranks:
        assert placed["second.weight"] == "(Shard(dim=1),)"


def test_a_rank_that_fails_is_named_by_all_and_hangs_nobody(two_ranks):
    (_, _, one), (_, _, two) = two_ranks
    assert one == two
    assert "rank 0 could not write the checkpoint" in one[0]
    assert "rank 1 could not write the checkpoint" in one[2]


@pytest.mark.slow
def test_zero3_into_tensor_parallelism_on_two_dimensions(tmp_path):
    wanted = launch(save, tmp_path, "llama", "zero3", "dp=4", "two_groups", ranks=4)[0]
    arguments = ("llama", "tp+zero3", "dp=2,tp=2", "two_groups")
    for losses, placed in launch(load, tmp_path, *arguments, ranks=4):
        assert close(losses[1:], wanted[:1])
        assert "Shard" in placed["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh", "optimizer"),
    [
        ("tp+zero3", "dp=2,tp=2", "two_groups"),
        ("tp+zero1", "dp=2,tp=2", "sgd"),
        ("hsdp", "replicate=2,shard=2", "adagrad"),
        ("tp", "tp=4", "sgd"),
    ],
)
def test_every_preset_to_one_rank_and_to_two(tmp_path, plan, mesh, optimizer):
    wanted = launch(save, tmp_path, "llama", plan, mesh, optimizer, ranks=4)[0]
    alone, _ = load(tmp_path, "llama", "zero3", None, optimizer)
    assert close(alone[1:], wanted[:1])
    for losses, _ in launch(load, tmp_path, "llama", "zero2", "dp=2", optimizer, ranks=2):
        assert close(losses, alone)


def fail_on_one_rank(folder):
    """One rank's disk is full, in the foreground and in the background."""
    engine, step = make("mlp", "zero3", "dp=2", "two_groups")
    step(1)
    engine.save(f"{folder}/a")
    rank, said = dist.get_rank(), []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (0, 1):
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        with pytest.raises(CheckpointError) as caught:
            engine.save(f"{folder}/a")
        said.append(str(caught.value))
        engine.save(f"{folder}/b", wait=False)
        steps = engine.stats.steps
        with pytest.raises(CheckpointError, match="checkpoint .*/b: "):
            for _ in range(1000):  # every rank raises at the same step
                step(1)
        said.append(engine.stats.steps - steps)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if rank == 1:
        os.rename(f"{folder}/a", f"{folder}/c")
    dist.barrier()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        engine.load(f"{folder}/a")
    engine.load(f"{folder}/c")
    engine.save(f"{folder}/b")
    if rank == 1:
        assert sorted(os.listdir(folder)) == ["b", "c"]

    class Failing(Position):
        def state_dict(self):
            if rank == 1:
                raise RuntimeError("the loader is lost")
            return {}

    with pytest.raises((CheckpointError, RuntimeError), match="the loader is lost"):
        engine.save(f"{folder}/b", extra={"failing": Failing(0)})
    with open(f"{folder}/c/__1_0.distcp", "r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match="__1_0.distcp"):
        engine.load(f"{folder}/c")
    return said
