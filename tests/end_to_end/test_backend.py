"""``torch.compile(..., backend="stepgraph")``, compiled autograd's collectives, and what is left behind."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import UsageError
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.program import BACKWARD
from tests.end_to_end.graph_by_graph import Broken, Cell, batch_of, loss_of, make_model
from tests.end_to_end.test_balance import Model, learn, run
from tests.end_to_end.training import llama_batch, tiny_llama

EAGER = {"lowering": "eager"}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def plain_gradients(model, x):
    model(x).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


# ---------------------------------------------------------------------------- a plain module


@pytest.mark.parametrize("options", [EAGER, EAGER | {"memory": "full"}], ids=str)
def test_a_plain_module_is_compiled_graph_after_graph(options):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 4)
    expected = plain_gradients(copy.deepcopy(model), x)
    compiled = torch.compile(model, backend="stepgraph", options=options)
    for found, wanted in zip(plain_gradients(compiled, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert "stepgraph" in torch._dynamo.list_backends()


def test_a_plain_module_under_inductor():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(4, 4)
    expected = plain_gradients(copy.deepcopy(model), x)
    found = plain_gradients(torch.compile(model, backend="stepgraph"), x)
    torch.testing.assert_close(found, expected)


def test_shapes_that_torch_makes_symbols_of():
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="stepgraph", options=EAGER)
    for rows in (4, 5, 6, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(
            plain_gradients(compiled, x), plain_gradients(copy.deepcopy(model), x)
        )


def test_dropout_is_the_same_where_it_is_recomputed():
    class Drops(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x.exp(), 0.5).exp()

    x = torch.randn(64, requires_grad=True)
    options = EAGER | {"memory": "full"}
    y = torch.compile(Drops(), backend="stepgraph", options=options)(x)
    kept = y.detach().log()  # the dropped values' input is zero
    y.sum().backward()
    expected = torch.where(kept != 0, y.detach() * kept, torch.zeros(64))
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)
    assert 0 < (kept == 0).sum() < 64


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"options": {"placement": "zero3"}}, "unknown option 'placement'"),
        ({"options": {"memory": "everything"}}, "unknown memory policy"),
        ({"options": {"lowering": "fast"}}, "unknown lowering"),
        ({"mode": "max-autotune"}, "no mode"),
    ],
)
def test_what_the_backend_does_not_know_is_an_error(wrong, match):
    with pytest.raises(Exception, match=match):
        torch.compile(Model(), backend="stepgraph", **wrong)(torch.ones(2, 4))


# -------------------------------------------------------------------------------- the round trip


def test_a_parallelized_module_replays_its_plan():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    made = stepgraph.parallelize(model, example=(x,), plan="zero3", lowering="eager")
    first = plain_gradients(made, x)
    compiles = made.forward.compiler.stats.compiles
    again = torch.compile(made, backend="stepgraph")
    second = plain_gradients(again, x)
    for one, two, wanted in zip(first, second, plain_gradients(plain, x), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
        torch.testing.assert_close(one.to_local(), wanted)
    assert made.forward.compiler.stats.compiles == compiles


def collectives_of(function):
    """What a call sends, by kind, as gloo sees it; its first call compiles."""
    function()
    with torch.profiler.profile() as profile:
        function()
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    return {name: names.count(name) for name in sorted(set(names))}


def compiled_once_more(kind, backend):
    """One rank: collectives and gradients of a step, of a parallelized module and of it compiled again."""
    rank = int(os.environ["RANK"])
    if kind == "broken":
        cell, example = Cell("zero3", "inductor"), batch_of(0, 0, 1)
        module, loss, part = make_model(cell), loss_of(cell), batch_of(0, rank, 2)
    elif kind == "small":
        torch.manual_seed(0)
        module, example = (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
            torch.ones(8, 6),
        )
        loss, part = (lambda m, x: m(x).square().mean()), torch.ones(4, 6)
    else:
        module, loss, example = tiny_llama(layers=1), lambda m, b: m(**b).loss, llama_batch(0)
        part = {name: x.chunk(2)[rank] for name, x in example.items()}
    model = stepgraph.parallelize(module, mesh="dp=2", plan="zero3", example=example, loss=loss)
    found = []
    for called in (model, torch.compile(model, backend=backend)):

        def step(called=called):
            model.zero_grad()
            called(part).backward()

        sent = collectives_of(step)
        found.append((sent, {n: p.grad.full_tensor() for n, p in model.named_parameters()}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (kind, backend)
        for kind in ("small", "broken", "whole")
        for backend in ("stepgraph", "inductor")
    ],
)
def test_compiling_a_parallelized_module_again_binds_nothing_twice(kind, backend):
    (sent, gradients), (sent_again, again) = launch(compiled_once_more, kind, backend, ranks=2)[0]
    assert sent == sent_again and sum(sent.values()) >= 3
    for name, value in gradients.items():
        assert torch.equal(value, again[name]), name


def test_a_module_knows_its_parameters_by_their_own_names():
    model = Broken()
    names = [name for name, _ in model.named_parameters()]
    made = stepgraph.parallelize(model, example=(batch_of(0)[0],), plan="zero3", lowering="eager")
    assert [name for name, _ in made.named_parameters()] == names
    assert set(made.state_dict()) == {*names, "head.weight"}
    weight = made.get_parameter("first.0.weight")
    assert weight is made.first[0].weight and isinstance(weight, nn.Parameter)
    assert type(made.first[0]).__name__ == "Linear" and isinstance(made.first[0], nn.Linear)
    assert made.first[0].weight.shape == (9, 6)


# ------------------------------------------------------------------------ collectives survive


def count_collectives():
    """One rank: how often each kind is in the backward, per graph and in the whole one."""
    found = {}
    for whole in (False, True):
        cell = Cell("zero3", compiled_autograd=whole)
        model = make_model(cell)
        engine = stepgraph.Engine(
            model,
            loss=loss_of(cell),
            plan="zero3",
            lowering="eager",
            schedule="none",  # one by one, as they were placed
        )
        engine.compile("eager", compiled_autograd=whole)
        rank = int(os.environ["RANK"])
        engine(batch_of(0, rank, 2)).backward()
        programs = engine._graphs.graphs.programs
        backward = (
            programs[-1].operations()
            if whole
            else [node for program in programs for node in program.operations(BACKWARD)]
        )
        kinds = [KINDS[node.target] for node in backward if is_collective(node)]
        found[whole] = ({kind: kinds.count(kind) for kind in sorted(set(kinds))}, len(programs))
    return found


def test_the_compiled_backward_holds_the_collectives_of_all_graphs():
    found = launch(count_collectives, ranks=2)[0]
    (by_graph, graphs), (whole, with_backward) = found[False], found[True]
    assert with_backward == graphs + 1  # one backward, over the graph breaks
    assert whole == by_graph
    assert whole["reduce_scatter"] >= 9 and whole["all_gather"] >= 3 and whole["all_reduce"] == 1


CACHED = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from tests.end_to_end.graph_by_graph import Cell, trained, plain, difference
cell = Cell("ddp", "inductor", sys.argv[1] == "on")
print(difference(cell, trained(cell), plain(cell)) < 1e-5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [("off", "on"), ("on", "off")], ids=str)
def test_a_warm_cache_serves_both(order, tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for whole in order:
        command = [sys.executable, "-c", CACHED, whole, ROOT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr[-2000:]


# ---------------------------------------------------------------------------- what is left behind


def torch_settings():
    import torch._functorch.config
    import torch._inductor.config

    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    return [copy.deepcopy(config.get_config_copy()) for config in configs]


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_left_of_a_model(whole):
    before = torch_settings()
    model = run(Model, learn, 3, parallel=True, whole=whole)
    runner = model.forward.graphs
    parts = [model, model.forward, runner, runner.compiler, runner.compiler.plan, runner.graphs]
    parts += [*runner.graphs.programs, type(model.first), *model.parameters()]
    seen = [weakref.ref(part) for part in parts]
    del model, runner, parts
    gc.collect()
    assert [part() for part in seen if part() is not None] == []
    assert torch_settings() == before


THIRTY = """
import gc, sys, torch
sys.path.insert(0, sys.argv[1])
import stepgraph

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.layers[1](x).relu()
        torch._dynamo.graph_break()
        x = self.layers[2](x).relu()
        torch._dynamo.graph_break()
        x = self.layers[3](x).relu()
        torch._dynamo.graph_break()
        return self.layers[4](x)

def train(whole):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = stepgraph.Engine(
        model, loss=lambda m, b: m(b).square().mean(), optimizer=optimizer, lowering="eager"
    )
    engine.compile("eager", compiled_autograd=whole)
    engine(torch.ones(2, 4)).backward()
    engine.optimizer_step()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

gc.collect()
gc.freeze()
for number in range(30):
    train(number % 5 == 0)
    gc.collect()
    if number == 9:
        after_ten = resident()
print(resident() / after_ten)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.slow
def test_thirty_engines_leave_next_to_nothing_in_memory():
    """In a process of its own; as a part of what the tenth left, most of which is imports.

    Values with a history go from graph to graph: torch leaks the fakes that it makes of them.
    """
    done = subprocess.run([sys.executable, "-c", THIRTY, ROOT], capture_output=True, text=True)
    assert float(done.stdout) < 1.025, done.stderr[-2000:]


def test_two_plans_for_one_class_do_not_share_code():
    kinds = []
    for memory in ("none", "full"):
        model = stepgraph.parallelize(
            Model(), example=(torch.ones(4, 4),), plan="ddp", lowering="eager", memory=memory
        )
        model(torch.ones(4, 4)).sum().backward()
        kinds.append(type(model.first))
        programs = model.forward.graphs.graphs.programs
        copies = [n for p in programs for n in p.operations() if "recomputed_from" in n.meta]
        assert len(programs) == 2 and bool(copies) == (memory == "full")
    assert kinds[0] is not kinds[1]


# ---------------------------------------------------------------------------------------- errors


def engine_of(model, **settings):
    return stepgraph.Engine(
        model, loss=lambda m, b: m(b).square().mean(), plan="ddp", lowering="eager", **settings
    )


def test_a_backward_of_the_backward_is_an_error():
    engine = engine_of(Model())
    loss = engine(torch.ones(2, 4))
    weight = engine.model.get_parameter("first.weight")
    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
        gradient.to_local().sum().backward()
    engine.compile("eager", compiled_autograd=True)
    with pytest.raises(RuntimeError, match="double backward"):
        engine(torch.ones(2, 4)).backward(create_graph=True)


def test_where_torch_has_no_compiled_autograd_the_error_names_its_version(monkeypatch):
    monkeypatch.delattr(torch._dynamo.compiled_autograd, "_enable")
    with pytest.raises(UsageError, match=torch.__version__.split("+")[0]):
        engine_of(Model()).compile("eager", compiled_autograd=True)


def test_a_model_that_is_captured_whole_says_that_there_is_nothing_to_add():
    engine = engine_of(nn.Linear(4, 3))
    engine.compile("eager", compiled_autograd_enabled=True)
    for _ in range(2):
        engine(torch.ones(2, 4)).backward()
    assert sum("nothing to add" in note for note in engine.notes) == 1


def test_a_full_graph_is_insisted_on():
    engine = engine_of(Model())
    engine.compile("eager", fullgraph=True)
    with pytest.raises(stepgraph.errors.GraphBreakError, match="graph_break"):
        engine(torch.ones(2, 4))


def test_other_settings_take_effect_at_the_next_call():
    engine = engine_of(Model())
    engine(torch.ones(2, 4)).backward()
    first = engine.stats.compiles
    engine.compile("eager", compiled_autograd=True)
    engine(torch.ones(2, 4)).backward()
    assert engine.stats.compiles == first + 1  # the backward
    engine.compile("eager", compiled_autograd=False)
    engine(torch.ones(2, 4)).backward()
    assert engine.stats.compiles == first + 1


def disagree():
    rank = int(os.environ["RANK"])
    engine = engine_of(Model())
    engine.step(torch.ones(2 + rank, 4))


def test_ranks_with_other_shapes_are_a_clear_error():
    with pytest.raises(stepgraph.errors.LaunchError, match=r"shapes|rows"):
        launch(disagree, ranks=2)


# ------------------------------------------------------------- what reviews of this road have found


def test_a_result_that_is_a_view_of_what_was_written():
    def write(x, y):
        x = x.clone()
        x[:, 1] = y[:, 0]
        return x.t()

    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    torch.compile(write, backend="stepgraph", options=EAGER)(x, y).sum().backward()
    assert x.grad.sum() == 8 and y.grad.sum() == 4


def test_a_graph_that_only_draws():
    drawn = torch.compile(lambda: torch.rand(64), backend="stepgraph", options=EAGER)()
    assert 0 <= drawn.min() < drawn.max() < 1


def made_of(kind, **settings):
    return stepgraph.parallelize(
        kind(), example=(torch.ones(4, 4),), plan="zero3", lowering="eager", **settings
    )


def test_a_write_into_a_parameter_is_an_error():
    class Clamps(Model):
        def forward(self, x):
            with torch.no_grad():
                self.first.weight.detach().clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(stepgraph.errors.CaptureError, match="writes into a parameter"):
        made_of(Clamps)(torch.ones(4, 4))


def test_parameters_read_as_a_list_are_a_clear_error():
    class Decays(Model):
        def forward(self, x):
            return super().forward(x) + sum(p.square().sum() for p in self.parameters())

    with pytest.raises(stepgraph.errors.CaptureError, match="reads a parameter in parts"):
        made_of(Decays)(torch.ones(4, 4))


def test_hooks_get_the_gradient_of_all_calls_under_compiled_autograd():
    found = []
    for whole in (False, True):
        torch.manual_seed(0)
        model, calls = made_of(Model, compiled_autograd=whole), []
        model.first.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        # dynamo of torch 2.11 does not trace a hook that is a builtin
        model.first.bias.register_post_accumulate_grad_hook(
            lambda bias, calls=calls: calls.append(bias)
        )
        x = torch.randn(4, 4)
        (model(x).square().sum() + model(x + 1).square().sum()).backward()
        found.append(model.first.bias.grad.to_local().clone())
        assert len(calls) == 1
    assert torch.equal(*found)


def test_checkpoint_across_a_break_is_a_clear_error_under_compiled_autograd():
    class Recomputes(Model):
        def forward(self, x):
            part = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
            return self.second(part)

        def part(self, x):
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return hidden.tanh()

    x = torch.ones(4, 4)
    made_of(Recomputes)(x).sum().backward()
    model = made_of(Recomputes, compiled_autograd=True)
    for _ in range(2):
        with pytest.raises(stepgraph.errors.CaptureError, match="compiled autograd"):
            model(x).sum().backward()
