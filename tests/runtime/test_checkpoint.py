"""Checkpoints of one process: what survives, what is refused, what is left when something fails."""

import json
import logging
import resource
import shutil
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import stepgraph
from stepgraph.errors import CheckpointError, UnfilledModelError, UsageError
from stepgraph.runtime.checkpoints.manifest import Manifest
from stepgraph.runtime.files import put_folder, recover_folder
from tests.sampling import sampled
from tests.support import adamw, mlp, regression_batch


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.3)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)


def asgd(model):
    return torch.optim.ASGD(model.parameters(), lr=0.01, t0=2)


def two_groups(model):
    named = dict(model.named_parameters())
    bias = [named.pop(name) for name in list(named) if "bias" in name]
    groups = [{"params": list(named.values())}, {"params": bias, "lr": 0.2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def make_engine(model=None, optimizer=adamw, **settings):
    model = mlp() if model is None else model
    made = optimizer(model) if optimizer else None
    return stepgraph.Engine(model, optimizer=made, **({"lowering": "eager"} | settings))


def step(engine, count=1, batch=None):
    batch = regression_batch() if batch is None else batch
    return [engine.step(batch).item() for _ in range(count)]


def everything(engine):
    """All tensors of an engine, copied; optimizer states under ``name/key``."""
    found = {name: value.full_tensor().clone() for name, value in engine.state_dict().items()}
    found |= {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    optimizer = engine.settings()["optimizer"]
    if optimizer is not None:
        optimizer.state_dict()  # makes them current
        for name, parameter in engine.model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                    found[f"{name}/{key}"] = whole.clone()
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(found[name], value), name


class Tied(nn.Module):
    """Tied weights, dropout, a bf16 and a frozen parameter, buffers of both kinds that a step writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5), persistent=False)

    def forward(self, x, y, weight):
        self.seen += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        hidden = torch.tanh(self.first(nn.functional.dropout(x)) - self.mean) * self.scale
        return ((self.second(hidden) + self.frozen).sum(1) - y.sum(1)).pow(2).mean()


def tied(seed=0):
    torch.manual_seed(seed)
    return Tied()


# ------------------------------------------------------------------------------- what survives


CASES = [(mlp, opt) for opt in (adamw, sgd, adagrad, asgd, two_groups)] + [(tied, adamw)]


@pytest.mark.parametrize(("model", "optimizer"), sampled(CASES, every=5))
def test_a_new_engine_goes_on_where_the_saved_one_was_bit_for_bit(tmp_path, model, optimizer):
    saved = make_engine(model(), optimizer, seed=7)
    step(saved, 3)
    saved.save(tmp_path / "a")
    at_save = everything(saved)
    losses = step(saved, 3)
    new = make_engine(model(seed=5), optimizer)
    new.load(tmp_path / "a")
    assert (new.stats.steps, new.seed) == (3, 7)
    assert_same(everything(new), at_save)
    assert step(new, 3) == losses
    assert_same(everything(new), everything(saved))
    # And into an engine that has stepped already, the same one:
    saved.load(tmp_path / "a")
    assert_same(everything(saved), at_save)
    assert step(saved, 3) == losses


@pytest.mark.parametrize("optimizer", [adamw, sgd, adagrad])
def test_a_save_before_the_first_step_is_the_beginning(tmp_path, optimizer):
    fresh = make_engine(optimizer=optimizer)
    fresh.save(tmp_path / "a")
    losses = step(fresh, 3)
    for engine in (fresh, make_engine(mlp(seed=5), optimizer)):
        engine.load(tmp_path / "a")
        assert engine.stats.steps == 0
        assert step(engine, 3) == losses
    # Loaded and saved again without a step between.
    fresh.save(tmp_path / "b")
    losses = step(fresh, 2)
    between = make_engine(optimizer=optimizer)
    between.load(tmp_path / "b")
    between.save(tmp_path / "c")
    last = make_engine(optimizer=optimizer)
    last.load(tmp_path / "c")
    assert step(last, 2) == losses


def test_extras_come_back_with_every_type_in_them(tmp_path):
    class Loader:
        def __init__(self, state=None):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    state = {"position": (3, {4: torch.arange(3)}), 5: [], "none": None, "names": {"a", "b"}}
    engine = make_engine()
    scheduler = torch.optim.lr_scheduler.StepLR(engine.settings()["optimizer"], 2, gamma=0.5)
    for _ in range(3):
        step(engine)
        scheduler.step()
    engine.save(tmp_path / "a", extra={"loader": Loader(state), "scheduler": scheduler})
    new, loader = make_engine(), Loader()
    optimizer = new.settings()["optimizer"]
    again = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    new.load(tmp_path / "a", extra={"scheduler": again, "loader": loader})
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert again.state_dict() == scheduler.state_dict()
    restored = loader.state["position"][1].pop(4)
    assert torch.equal(restored, torch.arange(3))
    assert loader.state == {"position": (3, {}), 5: [], "none": None, "names": {"a", "b"}}
    assert step(new, 2) == step(engine, 2)


def test_an_optimizer_of_ones_own_is_an_extra(tmp_path):
    def run(engine, optimizer, steps):
        losses = []
        for _ in range(steps):
            losses += step(engine)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    engine = make_engine(optimizer=None)
    optimizer = adamw(engine.model)
    run(engine, optimizer, 2)
    engine.save(tmp_path / "a", extra={"optimizer": optimizer})
    new = make_engine(mlp(seed=5), optimizer=None)
    other = adamw(new.model)
    new.load(tmp_path / "a", extra={"optimizer": other})
    assert run(new, other, 3) == run(engine, optimizer, 3)


def test_parameters_may_stand_in_another_order_and_in_other_groups(tmp_path):
    engine = make_engine(optimizer=two_groups)
    step(engine, 2)
    engine.save(tmp_path / "a")

    def reversed_groups(model):
        groups = two_groups(model).param_groups
        swapped = [{"params": g["params"][::-1], "lr": 0.7} for g in reversed(groups)]
        return torch.optim.AdamW(swapped, amsgrad=True)

    new = make_engine(mlp(seed=5), reversed_groups)
    new.load(tmp_path / "a")
    numbers = [(g["lr"], g["weight_decay"]) for g in new.settings()["optimizer"].param_groups]
    assert numbers == [(0.2, 0.0), (1e-2, 1e-2)]
    assert step(new, 3) == step(engine, 3)


def test_a_group_of_parameters_that_were_saved_apart_keeps_its_own_numbers(tmp_path, caplog):
    engine = make_engine(optimizer=two_groups)
    step(engine, 2)
    engine.save(tmp_path / "a")
    one = make_engine(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.3, amsgrad=True))
    with caplog.at_level(logging.WARNING, "stepgraph"):
        one.load(tmp_path / "a")
    assert "keeps its own lr, weight_decay" in caplog.text
    assert one.settings()["optimizer"].param_groups[0]["lr"] == 0.3
    step(one)


def test_a_model_on_the_meta_device_is_filled(tmp_path):
    engine = make_engine(tied())
    losses = step(engine, 2)
    engine.save(tmp_path / "a")
    engine.save(tmp_path / "weights.pt")
    with torch.device("meta"):
        model = Tied()
    empty = make_engine(model)
    with pytest.raises(UnfilledModelError, match="engine.load"):
        step(empty)
    empty.load(tmp_path / "a")
    assert_same(everything(empty), everything(engine))
    assert step(empty, 2) == step(engine, 2) != losses
    with torch.device("meta"):
        model = Tied()
    other = make_engine(model)
    other.load(tmp_path / "weights.pt")
    with pytest.raises(UnfilledModelError, match="for: mean"):  # it is in no state dict
        step(other)


def test_modules_keep_their_extra_state(tmp_path):
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls, "log": [1, 2]}

        def set_extra_state(self, state):
            self.calls, self.log = state["calls"], state["log"]

    def model(calls):
        made = mlp()
        made.first = Counting(5, 7)
        made.first.calls = calls
        return made

    make_engine(model(3)).save(tmp_path / "a")
    engine = make_engine(model(0))
    engine.load(tmp_path / "a")
    assert (engine.model.first.calls, engine.model.first.log) == (3, [1, 2])


def test_weights_alone_leave_the_optimizer_and_the_step(tmp_path):
    engine = make_engine()
    step(engine, 2)
    engine.save(tmp_path / "a")
    other = make_engine(mlp(seed=5), sgd, seed=3)
    step(other)
    before = everything(other)
    other.load(tmp_path / "a", weights_only=True)
    assert (other.stats.steps, other.seed) == (1, 3)
    momentum = {name: value for name, value in before.items() if "/" in name}
    for name, value in engine.state_dict().items():
        assert torch.equal(other.state_dict()[name].full_tensor(), value.full_tensor())
    for name, value in momentum.items():
        assert torch.equal(everything(other)[name], value)


# ------------------------------------------------------------------------------- plain PyTorch


def test_plain_pytorch_loads_a_checkpoint_and_goes_on(tmp_path):
    engine = make_engine(optimizer=two_groups)
    step(engine, 3)
    engine.save(tmp_path / "a")
    model = mlp(seed=5)
    optimizer = two_groups(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():  # there is no process group, and torch says so
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "a")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    plain = {**model.state_dict()}
    for name, parameter in model.named_parameters():
        plain |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    assert_same(plain, everything(engine))
    for _ in range(3):
        loss = model(*regression_batch())
        assert abs(loss.item() - step(engine)[0]) < 1e-5
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_becomes_one_file_by_torchs_own_tool(tmp_path):
    engine = make_engine(tied())
    step(engine, 2)
    engine.save(tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=False)
    plain = tied(seed=5)
    plain.load_state_dict(content["model"])
    for name, value in plain.state_dict().items():
        assert torch.equal(value, engine.state_dict()[name].full_tensor())
    assert json.loads((tmp_path / "a" / "stepgraph.json").read_text())["step"] == 2


@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors"])
def test_weights_go_to_and_from_one_file(tmp_path, suffix):
    path = tmp_path / f"weights.{suffix}"
    engine = make_engine(tied())
    step(engine, 2)
    engine.save(path, wait=False)
    before = everything(engine)
    step(engine)
    engine.wait_for_save()
    if suffix == "safetensors":
        from safetensors.torch import load_file, save_file

        content = load_file(path)
    else:
        content = torch.load(path, weights_only=True)
    plain = tied(seed=5)
    plain.load_state_dict(content)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name]), name
    engine.load(path)
    for name in content:
        assert torch.equal(everything(engine)[name], before[name])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    # A file as transformers writes it has a tied tensor once.
    del content["second.weight"]
    save_file(content, path) if suffix == "safetensors" else torch.save(content, path)
    engine.load(path)
    del content["first.bias"]
    save_file(content, path) if suffix == "safetensors" else torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"missing \['first.bias'\]"):
        engine.load(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_damaged_file_of_weights_is_named(tmp_path, suffix):
    path = tmp_path / f"weights.{suffix}"
    engine = make_engine()
    with pytest.raises(CheckpointError, match="there is no file .*weights"):
        engine.load(path)
    engine.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"weights.{suffix} is damaged, or not a file"):
        engine.load(path)
    with pytest.raises(UsageError, match="holds no extras"):
        engine.load(path, extra={"optimizer": engine.settings()["optimizer"]})


# ------------------------------------------------------------------------------- what is refused


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {"flipped": flip_a_bit, "truncated": truncate, "missing": Path.unlink}


def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path):
    engine = make_engine()
    engine.save(tmp_path / "early")
    losses = step(engine)
    engine.save(tmp_path / "late")
    other = make_engine(mlp(seed=5))
    before = everything(other)
    for name in ("__0_0.distcp", ".metadata", "stepgraph.json"):
        for damage, do in DAMAGES.items():
            folder = shutil.copytree(tmp_path / "late", tmp_path / damage, dirs_exist_ok=True)
            do(folder / name)
            with pytest.raises(CheckpointError) as caught:
                other.load(folder)
            assert name in str(caught.value)
    assert_same(everything(other), before)
    other.load(tmp_path / "early")
    assert step(other) == losses


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    engine = make_engine()
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*nowhere"):
        engine.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("no")
    with pytest.raises(CheckpointError, match="file' is a file"):
        engine.load(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is not a checkpoint"):
        engine.load(tmp_path / "empty")
    save_by_torch(tmp_path / "torchs")
    with pytest.raises(CheckpointError, match=r"torchs has no stepgraph.json(.|\n)*by torch"):
        engine.load(tmp_path / "torchs")
    with pytest.raises(CheckpointError, match="is not a checkpoint of stepgraph alone"):
        engine.save(tmp_path / "torchs")


def save_by_torch(path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"model": mlp().state_dict()}, checkpoint_id=path)


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    make_engine().save(tmp_path / "a")
    manifest = tmp_path / "a" / "stepgraph.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2; this version of stepgraph reads up to 1"):
        make_engine().load(tmp_path / "a")


def test_another_model_is_refused_before_anything_changes(tmp_path):
    engine = make_engine()
    step(engine)
    engine.save(tmp_path / "a")
    other = make_engine(tied())
    before = everything(other)
    with pytest.raises(CheckpointError, match="of another model: it lacks 'first.weight'|'frozen'"):
        other.load(tmp_path / "a")
    wider = mlp()
    wider.second = nn.Linear(7, 4, bias=False)
    with pytest.raises(CheckpointError, match=r"'second.weight' has shape \[3, 7\] in the checkp"):
        make_engine(wider).load(tmp_path / "a")
    assert_same(everything(other), before)


def test_another_optimizer_is_refused(tmp_path):
    engine = make_engine()
    step(engine)
    engine.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="was saved with AdamW, and this engine has SGD"):
        make_engine(optimizer=sgd).load(tmp_path / "a")
    engine = make_engine(optimizer=two_groups)
    step(engine)
    engine.save(tmp_path / "b")
    plain = make_engine()
    step(plain)
    with pytest.raises(CheckpointError, match="holds 'max_exp_avg_sq'"):
        plain.load(tmp_path / "b")


def test_an_optimizer_on_one_side_only_is_said(tmp_path, caplog):
    trained, frozen = make_engine(), make_engine(optimizer=None)
    step(trained)
    trained.save(tmp_path / "a")
    with caplog.at_level(logging.WARNING, "stepgraph"):
        frozen.load(tmp_path / "a")
        assert "this engine has no optimizer" in caplog.text
        frozen.save(tmp_path / "b")
        trained.load(tmp_path / "b")
        assert "this one starts afresh" in caplog.text


def test_extras_that_cannot_be_are_refused(tmp_path, caplog):
    engine = make_engine()
    optimizer = engine.settings()["optimizer"]
    with pytest.raises(UsageError, match="extra 'step' is a int without state_dict"):
        engine.save(tmp_path / "a", extra={"step": 3})
    engine.save(tmp_path / "a", extra={"model": mlp()})
    with pytest.raises(CheckpointError, match=r"has no extra 'modell'(.|\n)*did you mean 'model'"):
        engine.load(tmp_path / "a", extra={"modell": optimizer})
    with caplog.at_level(logging.WARNING, "stepgraph"):
        engine.load(tmp_path / "a")
    assert "not loaded: extra 'model'" in caplog.text


def test_a_type_that_differs_is_cast_and_said(tmp_path, caplog):
    make_engine().save(tmp_path / "a")
    half = make_engine(mlp().bfloat16())
    with caplog.at_level(logging.WARNING, "stepgraph"):
        half.load(tmp_path / "a")
    assert "cast on loading" in caplog.text
    assert torch.equal(half.model.scale.to_local(), torch.tensor(1.5, dtype=torch.bfloat16))


# --------------------------------------------------------------------- where it may not be saved


def test_a_save_replaces_a_checkpoint_and_nothing_else(tmp_path):
    engine = make_engine()
    engine.save(tmp_path / "a")
    step(engine)
    engine.save(tmp_path / "a")
    assert Manifest.read(tmp_path / "a").step == 1
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("a file")
    for name in ("a", "mine"):
        with pytest.raises(CheckpointError, match="which a save would remove"):
            engine.save(tmp_path / name)
    with pytest.raises(CheckpointError, match="file is a file"):
        engine.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not write the checkpoint .*file/a: "):
        engine.save(tmp_path / "file" / "a")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "file", "mine"]


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path):
    for left in (".a.saving-0123", ".a.saving-4567", ".ab.saving-0123"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "__0_0.distcp").write_text("half")
    make_engine().save(tmp_path / "a")
    assert sorted(e.name for e in tmp_path.iterdir()) == [".ab.saving-0123", "a"]


def test_a_folder_is_replaced_where_the_system_cannot_exchange_two(tmp_path, monkeypatch):
    monkeypatch.setattr("stepgraph.runtime.files._exchange", lambda a, b: False)
    engine = make_engine()
    engine.save(tmp_path / "a")
    step(engine)
    engine.save(tmp_path / "a")
    assert Manifest.read(tmp_path / "a").step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    # Killed between the two renames.
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    engine.load(tmp_path / "a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_folders_appear_whole(tmp_path):
    new, path = tmp_path / "new", tmp_path / "path"
    for text in ("one", "two"):
        new.mkdir()
        (new / "file").write_text(text)
        put_folder(new, path)
        assert (path / "file").read_text() == text
        assert not new.exists()
    recover_folder(path)
    assert (path / "file").read_text() == "two"


class SmallFiles:
    """While it is entered, no file grows past so many bytes: as on a disk that is full."""

    def __init__(self, limit=2000):
        self.limit = limit

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize("name", ["a", "a.pt", "a.safetensors"])
def test_a_full_disk_leaves_what_was_complete(tmp_path, name):
    engine = make_engine(mlp())
    step(engine)
    engine.save(tmp_path / name)
    before = everything(engine)
    step(engine)
    with SmallFiles(500), pytest.raises(CheckpointError, match="could not write the checkpoint"):
        engine.save(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    engine.load(tmp_path / name)
    for key in engine.state_dict():
        assert torch.equal(everything(engine)[key], before[key])


# ------------------------------------------------------------------------------ while it trains


def test_steps_go_on_while_a_save_is_written_and_do_not_tear_it(tmp_path):
    engine = make_engine()
    step(engine)
    at_save = everything(engine)
    engine.save(tmp_path / "a", extra={"optimizer": engine.settings()["optimizer"]}, wait=False)
    losses = step(engine, 5)
    engine.wait_for_save()
    new = make_engine(mlp(seed=5))
    new.load(tmp_path / "a")
    assert_same(everything(new), at_save)
    assert step(new, 5) == losses


@pytest.mark.parametrize("late", ["step", "save", "load", "wait_for_save"])
def test_the_error_of_a_save_in_the_background_is_raised_later(tmp_path, late):
    engine = make_engine()
    step(engine)
    engine.save(tmp_path / "a")
    with SmallFiles():
        engine.save(tmp_path / "b", wait=False)
        for thread in threading.enumerate():
            if thread.name == "save":
                thread.join()
    with pytest.raises(CheckpointError, match="could not write the checkpoint .*b: "):
        match late:
            case "step":
                step(engine)
            case "save":
                engine.save(tmp_path / "c")
            case "load":
                engine.load(tmp_path / "a")
            case _:
                engine.wait_for_save()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    engine.save(tmp_path / "b")
    assert engine.stats.steps == 1


def test_two_engines_save_side_by_side(tmp_path):
    one, two = make_engine(), make_engine(mlp(seed=5), sgd)
    step(one), step(two)
    one.save(tmp_path / "one", wait=False)
    two.save(tmp_path / "two", wait=False)
    states = everything(one), everything(two)
    step(one), step(two)
    one.load(tmp_path / "one")
    two.load(tmp_path / "two")
    assert_same(everything(one), states[0])
    assert_same(everything(two), states[1])


def test_nothing_is_left_behind(tmp_path):
    engine = make_engine()
    random, handlers = torch.get_rng_state(), [signal.getsignal(n) for n in (2, 15)]
    threads = threading.active_count()
    engine.save(tmp_path / "a", wait=False)
    engine.load(tmp_path / "a")
    assert threading.active_count() == threads
    assert torch.equal(torch.get_rng_state(), random)
    assert [signal.getsignal(n) for n in (2, 15)] == handlers
    assert not torch.distributed.is_initialized()
