"""Optimizer states that wait on the host: the same bits as without; live memory as predicted."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.counters import SharedCounters
from stepgraph.cli.launcher import launch
from stepgraph.cost.calibration import UNCALIBRATED
from stepgraph.errors import MemoryPolicyError, UsageError
from stepgraph.memory.decide import decide
from stepgraph.pipeline import foresee
from stepgraph.planning.plan import preset_plan, states_away
from stepgraph.program import roles
from stepgraph.program.copies import (
    TO_DEVICE,
    TO_HOST,
    TO_HOST_INTO,
    WAIT_COPY,
    WAIT_HOST,
    is_on_host,
)
from stepgraph.runtime import host_memory
from stepgraph.runtime.optimizer_state import Stored
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.torch_internals import TorchDispatchMode
from tests.live_memory import live_step
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import adamw, tiny_llama, token_batch

AWAY = {"optimizer": "offload"}
OPTIMIZERS = {
    "adamw": adamw,
    "adam, amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
}


class Small(nn.Module):
    """Weights that a whole-matrix optimizer can take, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - y).square().mean()


def rows(count=8):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(count, 8, generator=generator) for _ in range(2))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def of_engine(engine):
    """Parameters, and optimizer states as torch has them."""
    parameters = {name: whole(p).detach().clone() for name, p in engine.model.named_parameters()}
    states = engine._optimizer.state_dict()["state"]
    return parameters, [
        {k: whole(v).clone() for k, v in table.items() if isinstance(v, torch.Tensor)}
        for table in states.values()
    ]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def trained(memory, optimizer="adamw", lowering="eager", steps=3, **how):
    model = Small()
    engine = stepgraph.Engine(
        model, optimizer=OPTIMIZERS[optimizer](model), memory=memory, lowering=lowering, **how
    )
    losses = [engine.step(rows()) for _ in range(steps)]
    sent = [n for n in engine.programs["step"].operations() if n.target is TO_HOST]
    assert bool(sent) == (memory != "none")
    return losses, *of_engine(engine)


ROADS = {
    "plain": {},
    "micro-batches": {"micro_batches": 2},
    "clipped": {"max_grad_norm": 0.1},
    "16 bits": {"compute_dtype": torch.bfloat16},
}


@pytest.mark.parametrize(
    ("optimizer", "road"), sampled([(o, road) for o in OPTIMIZERS for road in ROADS], 12)
)
def test_the_same_bits_as_if_states_stayed(optimizer, road):
    expected = trained("none", optimizer, **ROADS[road])
    assert_same(trained(AWAY, optimizer, **ROADS[road]), expected)


@pytest.mark.parametrize("optimizer", sampled([*OPTIMIZERS], 2))
def test_the_same_bits_under_inductor(optimizer):
    assert_same(trained(AWAY, optimizer, "inductor"), trained("none", optimizer, "inductor"))


def test_beside_recomputed_and_offloaded_activations():
    both = {"layers.0": "recompute", "layers.1": "offload", **AWAY}
    assert_same(trained(both), trained("none"))


@pytest.mark.parametrize(
    ("preset", "mesh"),
    sampled([("tp+zero3", "dp=2,tp=2"), ("zero1", "dp=3"), ("zero2", "dp=2"), ("ddp", "dp=2")]),
)
def test_the_same_bits_on_all_ranks(preset, mesh):
    found, captured = [], None
    for memory in ("none", "optimizer=offload"):
        model = tiny_llama(2, num_key_value_heads=2)
        how = {"mesh": mesh, "plan": preset, "memory": memory, "captured": captured}
        run = OneProcessRun(model, optimizer=adamw(model), **how)
        found.append(([run.step(token_batch(6)) for _ in range(3)], run.parameters()))
        captured = run.captured
    assert_same(found[1], found[0])


def of_rank(folder):
    rank = torch.distributed.get_rank()
    batch = tuple(one.chunk(2)[rank] for one in rows())
    found = []
    for memory in ("none", AWAY):
        model = Small()
        how = {"mesh": "dp=2", "plan": "zero3", "lowering": "eager"}
        engine = stepgraph.Engine(model, optimizer=adamw(model), memory=memory, **how)
        losses = [engine.step(batch) for _ in range(2)]
        engine.save(f"{folder}/{memory == 'none'}")
        losses.append(engine.step(batch))
        found.append((losses, *of_engine(engine)))
        # What was saved under one is loaded under the other, and goes on to the same bits.
        model = Small()
        other = stepgraph.Engine(
            model, optimizer=adamw(model), memory=AWAY if memory == "none" else "none", **how
        )
        other.step(batch)
        other.load(f"{folder}/{memory == 'none'}")
        found.append(([*losses[:2], other.step(batch)], *of_engine(other)))
    return found


def test_on_two_real_ranks_through_checkpoints(tmp_path):
    for found in launch(functools.partial(of_rank, str(tmp_path)), ranks=2):
        for one in found[1:]:
            assert_same(one, found[0])


def test_a_state_dict_is_what_it_is_without_and_is_loaded_in_the_middle():
    found = []
    for memory in ("none", AWAY):
        model = Small()
        optimizer = adamw(model)
        engine = stepgraph.Engine(model, optimizer=optimizer, memory=memory, lowering="eager")
        engine.step(rows())
        kept = optimizer.state_dict()
        engine.step(rows())
        optimizer.load_state_dict(kept)
        engine.step(rows())
        found.append(of_engine(engine))
    assert_same(found[1], found[0])


def test_the_split_use_and_whole_steps_in_turn():
    found = []
    for memory in ("none", AWAY):
        model = Small()
        engine = stepgraph.Engine(model, optimizer=adamw(model), memory=memory, lowering="eager")
        for _ in range(2):
            engine.backward(engine(rows()))
            engine.optimizer_step()
        engine.step(rows())  # and both roads take the states from where they are
        found.append(of_engine(engine))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("memory", [AWAY, {"*.mlp": "recompute", **AWAY}], ids=str)
def test_live_memory_is_as_predicted_with_the_host_apart(memory):
    model, batch = tiny_llama(4), token_batch(length=24)
    engine = stepgraph.Engine(
        model, optimizer=adamw(model), mesh="dp=1", plan="ddp", memory=memory, lowering="eager"
    )
    engine.step(batch)
    live = live_step(engine, batch)
    found = foresee(engine.programs, UNCALIBRATED, "eager")
    assert found.peak_bytes == pytest.approx(live.peak, rel=0.05)
    assert found.bytes_by_category["on the host"] == pytest.approx(live.peak_on_host, rel=0.05)
    states = 2 * sum(p.numel() for p in model.parameters()) * 4
    assert live.peak_on_host == pytest.approx(states, rel=0.05)


def test_a_host_without_room_is_an_error(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: 1024)
    model = Small()
    engine = stepgraph.Engine(model, optimizer=adamw(model), memory=AWAY)
    with pytest.raises(MemoryPolicyError, match="the host has 1 KiB of memory"):
        engine.step(rows())


def test_states_are_not_recomputed_and_the_report_says_so():
    model = Small()
    asked = {"optimizer": "recompute"}
    engine = stepgraph.Engine(model, optimizer=adamw(model), memory=asked, lowering="eager")
    engine.step(rows())
    assert "optimizer states are not computed again" in engine.report()


class Named(Small):
    """It has a module of the name that else means the states."""

    def __init__(self):
        super().__init__()
        self.optimizer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x, y):
        return super().forward(self.optimizer(x), y)


@pytest.mark.parametrize("action", ["offload", "recompute"])
def test_a_module_of_that_name_is_meant_where_there_is_one(action):
    found = []
    for memory in ("none", {"optimizer": action}):
        model = Named()
        engine = stepgraph.Engine(model, optimizer=adamw(model), memory=memory, lowering="eager")
        losses = [engine.step(rows()) for _ in range(2)]
        found.append((losses, *of_engine(engine)))
        step = engine.programs["step"]
        assert not any(is_on_host(node) for _, node, _ in step.input_rows)
    decided = engine.plan.decisions["step"].memory
    assert bool(decided.offload) == (action == "offload")
    assert any(name.startswith("optimizer") for name in decided.offload or decided.recompute)
    assert_same(found[1], found[0])


def test_programs_of_one_step_take_states_from_one_place():
    """Under a budget each is searched by itself; what the first has on the host stays there."""
    model = Small()
    plan = preset_plan("ddp", parse_mesh("dp=1"), memory="budget:1GiB", device="h100")
    names = [f"OptimizerState(layers.{i}.weight.exp_avg)" for i in range(2)]
    engine = stepgraph.Engine(model, optimizer=adamw(model), lowering="eager")
    engine.step(rows())
    decided = engine.plan.decisions["step"]
    assert states_away(plan) is None
    for offload, expected in (((*names, "some/value"), tuple(names)), (None, ())):
        memory = replace(decided.memory, offload=offload)
        assert states_away(plan.with_decisions("step", replace(decided, memory=memory))) == expected
    engine.backward(engine(rows()))
    engine.optimizer_step()
    update = engine.programs["update"]
    kept = decide(update, "budget:1GiB", away=tuple(names))
    assert kept.offload == tuple(names)
    assert decide(update, "budget:1GiB").offload is None


def test_a_state_that_another_program_has_elsewhere_is_an_error(monkeypatch):
    """As on an accelerator; its host's memory is pinned, which cannot be had here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    model = Small()
    stored = Stored(model, adamw(model), None, torch.device("meta"))
    stored.counters = SharedCounters(lambda *_: None)
    role = roles.OptimizerState("layers.0.weight", "exp_avg")
    stored.hold(role, torch.ones(8, 8), on_host=True)
    held = stored.tensors[role]
    assert held.device.type == "cpu"
    stored.hold(role, held, on_host=True)
    with pytest.raises(UsageError, match="waits on the host for one way to run the step"):
        stored.hold(role, held, on_host=False)
    stored.forget_programs()
    stored.hold(role, held, on_host=False)
    assert stored.tensors[role].device.type == "meta"


class Late(TorchDispatchMode):
    """Every copy happens when it is waited for: what is read before, or freed, is found out."""

    def __init__(self):
        super().__init__()
        self.started, self.arrived = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is TO_DEVICE:
            found = torch.full_like(args[0], float("nan"))
            self.started[found.data_ptr()] = args[0].data_ptr(), args[0].clone()
            return found
        if func is TO_HOST_INTO:
            held, source = args
            held.fill_(float("nan"))
            self.started[held.data_ptr()] = source.data_ptr(), source.clone()
            return None
        if func in (WAIT_COPY, WAIT_HOST):
            copied, source = args[:2]
            at, before = self.started.pop(copied.data_ptr())
            assert source.data_ptr() == at and torch.equal(source, before)
            assert copied.isnan().all()
            copied.copy_(source)
            self.arrived += 1
            return copied if func is WAIT_COPY else None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_what_is_copied_stays_until_it_has_arrived(lowering, clip):
    expected = trained("none", lowering=lowering, max_grad_norm=clip)
    model = Small()
    how = {"memory": AWAY, "lowering": lowering, "max_grad_norm": clip}
    engine = stepgraph.Engine(model, optimizer=adamw(model), **how)
    losses = [engine.step(rows())]
    with Late() as late:
        losses += [engine.step(rows()) for _ in range(2)]
    assert late.arrived == 2 * 2 * 6 and not late.started
    assert_same((losses, *of_engine(engine)), expected)
