"""Offloaded activations: the same bits as without, on any road; live memory as predicted."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.cost.calibration import UNCALIBRATED
from stepgraph.errors import MemoryPolicyError
from stepgraph.memory.patterns import ACTIONS
from stepgraph.pipeline import foresee
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from stepgraph.runtime import host_memory
from stepgraph.torch_internals import TorchDispatchMode
from tests.live_memory import live_step
from tests.memory.test_budget import tiny_gpt2
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import adamw, tiny_llama, token_batch


class Convolutions(nn.Module):
    """Batch norm, pooling of which the backward reads positions, dropout, memory that lies turned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU())
            for _ in range(2)
        )
        self.pool, self.last = nn.MaxPool2d(2), nn.Linear(48, 5)

    def forward(self, x, y):
        x = x.to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = x + layer(x)
        x = nn.functional.dropout(self.pool(x), 0.25, self.training)
        return nn.functional.cross_entropy(self.last(x.flatten(1)), y)


def convolutions():
    torch.manual_seed(0)
    return Convolutions().train()


def images(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.arange(rows) % 5


MODELS = {
    "llama": (functools.partial(tiny_llama, 2, num_key_value_heads=2), token_batch(4)),
    "gpt2 with dropout": (tiny_gpt2, token_batch(4)),
    "batch norm": (convolutions, images()),
}
POLICIES = {
    "everything": {"*": "offload"},
    "a part": {"*.mlp": "recompute", "*layers.1": "save", "*.0": "offload", "*layers": "offload"},
}


def state_of(engine):
    model = engine.model
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }


@functools.cache
def trained(model, memory, lowering="eager", micro_batches=1):
    """Losses, state and copies of two steps in one process."""
    make, batch = MODELS[model]
    module = make()
    engine = stepgraph.Engine(
        module,
        optimizer=adamw(module),
        mesh="dp=1",
        plan="ddp",
        memory="none" if memory is None else POLICIES[memory],
        lowering=lowering,
        micro_batches=micro_batches,
    )
    losses = [engine.step(batch) for _ in range(2)]
    return losses, state_of(engine), sent(engine.programs), engine


def sent(programs):
    return sum(n.target is TO_HOST for p in programs.values() for n in p.operations())


def assert_same(found, expected):
    (losses, state, copies, *_), (losses_of_none, state_of_none, none, *_) = found, expected
    assert copies and not none
    assert all(torch.equal(*pair) for pair in zip(losses, losses_of_none, strict=True))
    assert state.keys() == state_of_none.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, state_of_none[name]), name


@pytest.mark.parametrize(
    ("model", "memory", "micro_batches"),
    sampled([(model, memory, n) for model in MODELS for memory in POLICIES for n in (1, 2)], 11),
)
def test_the_same_bits_as_if_all_were_kept(model, memory, micro_batches):
    expected = trained(model, None, micro_batches=micro_batches)
    assert_same(trained(model, memory, micro_batches=micro_batches), expected)


@pytest.mark.parametrize(
    ("preset", "mesh"),
    sampled([("tp+zero3", "dp=2,tp=2"), ("zero3", "dp=2"), ("zero1", "dp=3")], 3),
)
def test_the_same_bits_on_all_ranks(preset, mesh):
    captured, found = None, {}
    for memory in ("none", "*.mlp=recompute,*=offload"):
        model = tiny_llama(2, num_key_value_heads=2)
        how = {"mesh": mesh, "plan": preset, "memory": memory, "captured": captured}
        run = OneProcessRun(model, optimizer=adamw(model), **how)
        losses = [run.step(token_batch(6)) for _ in range(2)]
        captured = run.captured
        found[memory] = losses, run.parameters(), sent(run.programs)
    none, offloaded = found.values()
    assert_same(offloaded, none)


def of_rank():
    found = []
    rank = torch.distributed.get_rank()
    batch = tuple(rows.clone().chunk(2)[rank] for rows in images())
    for memory in ("none", "*=offload"):
        model = convolutions()
        how = {"mesh": "dp=2", "plan": "zero3", "memory": memory, "lowering": "eager"}
        engine = stepgraph.Engine(model, optimizer=adamw(model), **how)
        losses = [engine.step(batch) for _ in range(2)]
        found.append((losses, state_of(engine), sent(engine.programs)))
    return found


def test_the_same_bits_on_two_real_ranks():
    for none, offloaded in launch(of_rank, ranks=2):
        assert_same(offloaded, none)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_inductor_compiles_is_the_same_within_rounding(model):
    losses, state, copies, _ = trained(model, "everything", "inductor")
    expected = trained(model, None, "inductor")
    assert copies
    torch.testing.assert_close(losses, expected[0])
    torch.testing.assert_close(state, expected[1], rtol=1e-4, atol=1e-5)


def test_a_step_in_two_calls_hands_what_is_offloaded_to_the_backward():
    found = {}
    for memory in ("none", {"*": "offload"}):
        model = convolutions()
        engine = stepgraph.Engine(
            model, optimizer=adamw(model), plan="ddp", memory=memory, lowering="eager"
        )
        losses = []
        for _ in range(2):
            loss = engine(images())
            engine.backward(loss)
            engine.optimizer_step()
            losses.append(loss.detach())
        found[str(memory)] = losses, state_of(engine), sent(engine.programs)
    none, offloaded = found.values()
    assert_same(offloaded, none)


# ------------------------------------------------------------------------------ random modules


class Random(nn.Module):
    """Layers of random kinds, each with residuals, views or dropout."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in kinds)

    def forward(self, x, y):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            h = layer(x)
            match kind:
                case "residual":
                    x = x + torch.tanh(h)
                case "turned":
                    x = torch.exp(0.1 * (h.t() @ x).t().flatten().view(4, 4)[:, :4]).repeat(2, 1)
                case "dropped":
                    x = nn.functional.dropout(torch.sigmoid(h), 0.5) * x
                case "split":
                    one, other = (h * h).chunk(2, dim=-1)
                    x = torch.cat([torch.sin(one) * other, x[:, 2:]], -1)
        return ((x - y) ** 2).mean()


KINDS = ("residual", "turned", "dropped", "split")


@settings(max_examples=8)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=3),
    rest=st.sampled_from(ACTIONS),
)
def test_any_module_under_any_actions_is_the_same(kinds, actions, rest):
    table = {f"layers.{i}": action for i, action in enumerate(actions[: len(kinds)])}
    found = []
    generator = torch.Generator().manual_seed(2)
    batch = tuple(torch.randn(8, 4, generator=generator) for _ in range(2))
    captured = None
    for memory in ("none", ",".join(f"{k}={v}" for k, v in (table | {"*": rest}).items())):
        torch.manual_seed(0)
        model = Random(kinds).train()
        how = {"mesh": "dp=2", "plan": "zero3", "memory": memory, "captured": captured}
        run = OneProcessRun(model, optimizer=adamw(model), **how)
        found.append(([run.step(batch) for _ in range(2)], run.parameters()))
        captured = run.captured
    (losses, parameters), (others, other_parameters) = found
    assert all(torch.equal(*pair) for pair in zip(losses, others, strict=True))
    assert all(torch.equal(p, other_parameters[name]) for name, p in parameters.items())


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "memory", sampled([{"*.mlp": "recompute", "*layers.*": "offload"}, {"*": "offload"}])
)
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
    assert live.peak_on_host > 0
    assert "on the host " in engine.report()


def test_a_host_without_room_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory_bytes", lambda: 1024)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model = tiny_llama(1)
    engine = stepgraph.Engine(model, optimizer=adamw(model), plan="ddp", memory={"*": "offload"})
    with pytest.raises(MemoryPolicyError, match="the host has 1 KiB of memory, and 4 ranks would"):
        engine.step(token_batch(4))


class Late(TorchDispatchMode):
    """Every copy happens when it is waited for: what is read before, or written over, is found out."""

    def __init__(self):
        super().__init__()
        self.started, self.arrived = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (TO_HOST, TO_DEVICE):
            found = torch.full_like(args[0], self._unknown(args[0]))
            assert found.stride() == args[0].stride()
            self.started[found.data_ptr()] = args[0].data_ptr(), args[0].clone()
            return found
        if func is WAIT_COPY:
            copied, source = args
            at, before = self.started.pop(copied.data_ptr())
            assert source.data_ptr() == at  # and not a copy of it: that would not keep it alive
            torch.testing.assert_close(source, before, rtol=0, atol=0, equal_nan=True)
            unknown = torch.full_like(copied, self._unknown(copied))
            torch.testing.assert_close(copied, unknown, rtol=0, atol=0, equal_nan=True)
            copied.copy_(source)
            self.arrived += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _unknown(x):
        return float("nan") if x.is_floating_point() else 1


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.1), (4, 0.0)])
def test_inductor_copies_the_memory_that_its_wait_keeps(layers, dropout):
    """Keys in a cache, as transformers have them: a ``cat`` of one, laid out as its argument."""
    model = tiny_llama(
        layers, num_key_value_heads=2, use_cache=True, attention_dropout=dropout
    ).train()
    engine = stepgraph.Engine(
        model, optimizer=adamw(model), plan="ddp", memory={"*": "offload"}, lowering="inductor"
    )
    losses = [engine.step(token_batch(4))]
    with Late() as late:
        losses += [engine.step(token_batch(4)) for _ in range(2)]
    assert late.arrived > 20 and not late.started
    kept = tiny_llama(
        layers, num_key_value_heads=2, use_cache=True, attention_dropout=dropout
    ).train()
    other = stepgraph.Engine(kept, optimizer=adamw(kept), plan="ddp", lowering="eager")
    expected = [other.step(token_batch(4)) for _ in range(3)]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
