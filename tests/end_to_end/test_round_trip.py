"""A parallelized module compiled once more: its graph has the programs that were decided, both sides."""

from __future__ import annotations

import copy
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import UsageError
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.planning.request import Request
from stepgraph.planning.target import usual_target
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import is_copy
from stepgraph.program.layout import data_mesh
from stepgraph.program.program import BACKWARD, FORWARD
from tests.end_to_end.models import bring
from tests.sampling import sampled


class Normed(nn.Module):
    """Running statistics, dropout, two results, one of which every rank has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(3))  # written, and not read

    def forward(self, x):
        hidden = self.drop(self.norm(self.first(x)).relu()) * self.scale
        result = self.second(hidden)
        self.seen.copy_(result.detach().mean(0))
        return result, hidden.mean()


class Sides:
    """A backend that runs the graphs that AOTAutograd hands it, and keeps what they send."""

    def __init__(self, as_inductor):
        self.sent: list[list[str]] = []
        how = {"partition_fn": min_cut_rematerialization_partition} if as_inductor else {}
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep, **how)

    def keep(self, graph, examples):
        names = [str(node.target) for node in graph.graph.nodes]
        sent = [name for name in names if "_c10d_functional" in name and "wait" not in name]
        self.sent.append([name.split(".")[1] for name in sent])
        return make_boxed_func(graph.forward)


def three_steps(call, module, x):
    """What three training steps, the second on other rows, compute and leave behind."""
    found = []
    for rows in (x, x + 1, x):
        rows = rows.clone().requires_grad_()
        result, mean = call(rows)
        loss = result.square().mean() + mean
        loss.backward()
        found += [loss.detach(), rows.grad, *(b.clone() for b in module.buffers())]
        found += [p.grad.to_local() for p in module.parameters()]
        module.zero_grad()
    return found


def trained_twice(plan, backend, mesh):
    """One rank: what it trains as it stands, and compiled again; what that sends, and what was decided."""
    rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // 2)
    example = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    part, sides, found = example.chunk(2)[rank], Sides(backend == "min-cut"), []
    for again in (False, True):
        torch.manual_seed(0)
        module = stepgraph.parallelize(
            Normed(), mesh=mesh, plan=plan, example=(example,), lowering="eager"
        )
        module(part.clone().requires_grad_())  # the example's gradient is not wanted: compiled anew
        own = backend in ("", "min-cut")
        chosen = {"backend": sides.backend if own else backend, "fullgraph": True}
        call = torch.compile(module, **chosen) if again else module
        found.append(three_steps(call, module, part))
    program = module.forward.compiler.programs["gradients"]
    phases = [filter(is_collective, program.operations(phase)) for phase in (FORWARD, BACKWARD)]
    return (*found, sides.sent, [[kind_of(node) for node in nodes] for nodes in phases])


def kind_of(node):
    return str(node.target).split(".")[1]


CELLS = [
    ("zero3", "", "dp=2", 2), ("ddp", "", "dp=2", 2), ("zero3", "inductor", "dp=2", 2),
    ("zero1", "stepgraph", "dp=2", 2), ("tp+zero3", "", "dp=2,tp=2", 4),
    ("zero3", "min-cut", "dp=2", 2),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "backend", "mesh", "ranks"), sampled(CELLS, every=5))
def test_a_module_compiled_again_trains_alike_and_gathers_the_same(plan, backend, mesh, ranks):
    """Dropout, running statistics, gradients of inputs and ranks' parts that are padded included."""
    for first, second, sent, decided in launch(trained_twice, plan, backend, mesh, ranks=ranks):
        for one, two in zip(first, second, strict=True):
            if backend not in ("", "min-cut"):
                torch.testing.assert_close(one, two)
            else:
                assert torch.equal(one, two)
        decided[1].append("all_reduce")  # of the mean's tangent, before the backward
        if not backend:  # AOTAutograd parts both again, and is told what is kept
            assert [*map(Counter, sent)] == [*map(Counter, decided)]
        elif backend == "min-cut":  # as inductor does: what is sent twice alike is sent once
            for again, first_time in zip(map(Counter, sent), map(Counter, decided), strict=True):
                assert not again - first_time and {*again} == {*first_time}
                assert again["all_gather_into_tensor"] == first_time["all_gather_into_tensor"]


def kept_twice(name, plan, memory, mesh):
    """One rank: what is kept for the backward as a module stands, and compiled again; in bytes."""
    brought, dims = bring(name), mesh.split(",")
    ranks, data = int(os.environ["WORLD_SIZE"]), int(dims[0].split("=")[1])
    mine = int(os.environ["RANK"]) // (ranks // data)
    rows = {key: tensor.chunk(data)[mine] for key, tensor in brought.batch.items()}
    module = stepgraph.parallelize(
        brought.model, mesh=mesh, plan=plan, memory=memory, example=brought.batch, lowering="eager"
    )
    own = [*(p.to_local() for p in module.parameters()), *module.buffers()]
    if isinstance(memory, dict):
        own += rows.values()  # torch's partitioner hands on labels, too, which no backward reads
    state = {tensor.untyped_storage().data_ptr() for tensor in own}
    calls = module, torch.compile(module, fullgraph=True)
    for call in calls:
        call(**rows)
    return [kept_by(call, rows, state) for call in calls]


def kept_by(call, rows, state):
    """Bytes of the storages in which a call keeps tensors, but for the module's own."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call(**rows)
    result.loss.backward()
    return sorted(size for at, size in kept.items() if at not in state)


KEPT = [
    ("llama", "zero3", "layers:2", "dp=2", 2), ("gpt2", "zero3", "full", "dp=2", 2),
    ("llama", "zero3", "none", "dp=2", 2), ("llama", "ddp", "ops", "dp=2", 2),
    ("gpt2", "zero1", "none", "dp=2", 2), ("llama", "tp+zero3", "full", "dp=2,tp=2", 4),
    ("llama", "zero3", {"*": "offload"}, "dp=2", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "memory", "mesh", "ranks"), sampled(KEPT, every=6))
def test_plain_inductor_keeps_what_was_decided(name, plan, memory, mesh, ranks):
    """Tensor for tensor, and how often state was written; inductor makes GPT-2's constants again."""
    for first, second in launch(kept_twice, name, plan, memory, mesh, ranks=ranks):
        kept, decided = Counter(second), Counter([*first, torch.int64.itemsize])
        assert not kept - decided
        assert kept == decided or name == "gpt2"


class Layer(nn.Module):
    """A product that is gathered alone, and small parameters that could be gathered with other layers'."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.LayerNorm(1024), nn.LayerNorm(1024)
        self.product = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return x + self.last(self.product(self.first(x)))


def sent_twice(target):
    """One rank: what forward and backward send, and where they wait; as decided, and by our own backend."""
    module = nn.Sequential(*(Layer() for _ in range(4)))
    x = torch.ones(4, 1024)
    stepgraph.parallelize(module, plan="zero3", mesh="dp=2", example=(x,), lowering="eager")
    module(x[:2]).sum().backward()
    compiler = GraphCompiler(Request("ddp", data_mesh(1), lowering="eager"), target)
    again = torch.compile(module, backend=compiler, fullgraph=True)
    again(x[:2]).sum().backward()
    decided = module.forward.compiler.programs["gradients"]
    return [sent_by(program) for program in (decided, *compiler.programs)]


def sent_by(program):
    """Collectives and waits among the operations of each phase, in order, with shapes."""
    return [
        [
            (str(node.target), node.meta["val"].shape)
            for node in program.operations(phase)
            if "_c10d_functional" in str(node.target)
        ]
        for phase in (FORWARD, BACKWARD)
    ]


def test_our_own_backend_does_not_decide_again_what_is_sent_together():
    """Not even for a target whose calls cost so much that all of a kind would be sent as one."""
    target = replace(usual_target("cpu"), call_bytes=10**9, overlaps=True)
    for decided, again in launch(sent_twice, target, ranks=2):
        assert again == decided
        assert sum("all_gather" in name for name, _ in again[0]) > 4  # not one for all layers


def one_process(**settings):
    torch.manual_seed(0)
    settings = {"example": (torch.ones(4, 6),), "lowering": "eager", **settings}
    module = stepgraph.parallelize(Normed(), **settings)
    return module, torch.compile(module, backend="aot_eager", fullgraph=True), torch.ones(4, 6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "stepgraph"])
def test_what_waits_on_the_host_waits_there_again(backend):
    """Whatever a compiler does with memory that it takes for its own."""
    found = []
    for again in (False, True):
        module, _, _ = one_process(memory={"*": "offload"})
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        module(x.clone().requires_grad_())
        call = torch.compile(module, backend=backend, fullgraph=True) if again else module
        found.append(three_steps(call, module, x))
        assert any(map(is_copy, module.forward.compiler.programs["gradients"].operations()))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_a_value_of_python_that_changes_behind_a_traced_module_is_an_error():
    module, again, x = one_process()
    again(x)
    module.scale = 2.0
    with pytest.raises(UsageError, match="changed since torch.compile traced it: .*scale == 1.0"):
        again(x)
    torch.compiler.reset()
    again = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        assert again(x)[0].shape == (4, 3)  # compiled anew, behind a break


@pytest.mark.parametrize(
    "change",
    sampled(
        [
            lambda m: m.second.register_forward_hook(lambda module, args, result: 2 * result),
            lambda m: m.drop.eval(),
            lambda m: m.eval(),
        ]
    ),
)
def test_modes_and_hooks_may_change_between_calls(change):
    module, _, x = one_process()
    again = torch.compile(module, backend="aot_eager")
    again(x)
    change(module)
    torch.compiler.reset()
    found, _ = again(x)
    module.norm.load_state_dict({n: b.clone() for n, b in module.norm.state_dict().items()})
    assert found.shape == module(x)[0].shape


@pytest.mark.slow
def test_modes_change_within_a_traced_function():
    module, _, x = one_process()

    @torch.compile(backend="aot_eager")
    def run():
        module.eval()
        with torch.no_grad():
            quiet, _ = module(x)
        module.train()
        return quiet, module(x)[0]

    first, second = run(), run()
    module.eval()
    with torch.no_grad():
        assert not torch.equal(first[0], first[1]) and first[0].shape == second[0].shape


def test_what_is_written_between_forward_and_backward_is_an_error():
    module, again, x = one_process()
    result, _ = again(x)
    with torch.no_grad():
        module.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        result.sum().backward()


def test_hooks_that_no_program_can_have_are_errors():
    module, again, x = one_process()
    again(x)
    module.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(Exception, match="hook"):
        again(x)


def test_one_tensor_may_be_given_twice():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x, y):
            return x * self.factor * y.sin()

    x = torch.randn(4, 2)
    module = stepgraph.parallelize(Both(), example=(x, x), lowering="eager")
    again = torch.compile(module, backend="aot_eager", fullgraph=True)
    for y in (x, x + 1):
        torch.testing.assert_close(again(x, y), 3 * x * y.sin())


def test_tensors_may_be_views_of_any_kind():
    module, again, _ = one_process()
    x = torch.randn(6, 4).t()
    again(x)[0].t().contiguous().t().square().sum().backward()
    result, _ = again(x)
    (result.t().matmul(torch.ones(4, 2)) ** 2).sum().backward()
    assert torch.isfinite(module.first.weight.grad.to_local()).all()


@pytest.mark.slow
def test_other_calls_are_compiled_as_they_come():
    """Another mode, no gradients, other rows: what is not there yet breaks the graph, and is there then."""
    module, _, x = one_process()
    again = torch.compile(module, backend="aot_eager")
    assert again(x)[0].requires_grad
    with torch.no_grad():
        assert not again(x)[0].requires_grad
    more = torch.ones(8, 6)
    assert again(more)[0].shape == (8, 3)
    module.eval()
    for rows in (x, more):
        torch.testing.assert_close(again(rows)[0], module(rows)[0])


@pytest.mark.slow
def test_a_language_models_result_is_its_own_class():
    brought = bring("gpt2")
    rows = {name: tensor[:2] for name, tensor in brought.batch.items()}
    found = []
    for compiled in (False, True):
        model = copy.deepcopy(brought.model)
        stepgraph.parallelize(model, example=rows, lowering="eager")
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        result = call(**rows)
        result.loss.backward()
        found.append((result, {n: p.grad.to_local() for n, p in model.named_parameters()}))
    (plain, gradients), (again, theirs) = found
    assert type(plain) is type(again) and torch.equal(plain.loss, again.loss)
    assert all(torch.equal(gradients[name], theirs[name]) for name in gradients)


@pytest.mark.slow
def test_of_several_programs_for_one_batch_that_which_fits_is_traced():
    """A frozen parameter, a value of Python: what was compiled for it is taken, then what was before."""
    module, _, x = one_process()
    expected = []
    for scale, trained in ((1.0, True), (2.0, True), (1.0, False), (1.0, True)):
        module.scale = scale
        module.first.weight.requires_grad_(trained)
        result, _ = module(x)
        expected.append(bool(result.grad_fn))
        torch.compiler.reset()
        again = torch.compile(module, backend="aot_eager", fullgraph=True)
        again(x)[1].backward()
        found = module.first.weight.grad
        assert (found is not None) == trained
        module.zero_grad()
    assert all(expected) and len(module.forward.replays) == 1
