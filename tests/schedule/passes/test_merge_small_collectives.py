"""merge_small_collectives: fewer calls, the same bits."""

import contextlib
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._inductor.graph import GraphLowering

from stepgraph import torch_internals
from stepgraph.lowering.apply import lower
from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.lowering.passes.name_groups import name_groups
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.program import BACKWARD, FORWARD
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.schedule import decide
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from tests.sampling import sampled
from tests.schedule.rescheduled import rescheduled
from tests.support import (
    HOST,
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden,
    bound,
    compiled,
    mlp,
    programs_of,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (x[:, :3] * self.a).sum() + (x * self.b).sum()


def calls(program):
    return sum(is_collective(node) for node in program.operations())


def merged(program):
    return rescheduled(program, merge_small_collectives)


def change_sizes(monkeypatch, **sizes):
    changed = replace(decide.sizes_for(HOST), **sizes)
    monkeypatch.setattr(decide, "sizes_for", lambda target: changed)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_the_text_shows_one_flat_collective(plan):
    before = compiled(Two(), torch.ones(2, 5), ranks=2, plan=plan).programs["step"]
    assert_golden(__file__, f"merge_small_collectives_{plan}", before, merged(before))


@pytest.mark.parametrize(
    ("plan", "ranks"),
    sampled(list(product(["ddp", "zero1", "zero2", "zero3"], RANKS)), every=3),
)
def test_every_result_is_the_same_bits(plan, ranks):
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    before = compiled(model, batch, optimizer, ranks=ranks, plan=plan).programs["step"]
    after = merged(before)
    inputs = values(model, batch, optimizer)
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))
    assert calls(after) <= calls(before)


@pytest.mark.parametrize("plan", sampled(["ddp", "zero3"]))
def test_a_transformers_collectives_become_few_and_keep_every_bit(plan):
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    before = compiled(model, batch, optimizer, ranks=3, plan=plan, memory="full").programs["step"]
    after = merged(before)
    assert calls(after) < calls(before) / 2
    inputs = values(model, batch, optimizer)
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, None]))
def test_copies_of_shards_keep_no_collectives_apart(dtype):
    """A shard of a transposed weight is copied, or cast, for its gather, and its gradient back again."""
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    step = StepSettings("adamw", precision=Precision(dtype))
    settings = {"schedule": "none", "step": step}
    plan = preset_plan("tp+zero3", parse_mesh("dp=2,tp=2"), **settings)
    before = programs_of(model, batch, plan, optimizer).programs["step"]
    after = merged(before)
    for kind, phase in (("all_gather", FORWARD), ("reduce_scatter", BACKWARD)):
        many, few = (
            sum(KINDS.get(node.target) == kind for node in program.operations(phase))
            for program in (before, after)
        )
        assert many > 10 and few == 1
    inputs = values(model, batch, optimizer, settings=step)
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))


def test_a_flat_collective_is_no_larger_than_its_limit(monkeypatch):
    change_sizes(monkeypatch, large=100, reduction=200, gather=200)
    model, batch = mlp(), regression_batch()
    before = compiled(model, batch, adamw(model), ranks=2).programs["step"]
    after = merged(before)
    for node in after.operations():
        if is_collective(node) and node.args[0].target is torch.ops.aten.cat.default:
            sizes = [
                v.numel() * v.element_size() for v in (node.meta["val"], node.args[0].meta["val"])
            ]
            assert max(sizes) <= 200
    inputs = values(model, batch, adamw(model))
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))


def test_a_wait_stands_right_before_the_first_reader():
    program = compiled(mlp(), regression_batch(), ranks=2).programs["step"]
    after = merged(program)
    nodes = list(after.graph.nodes)
    moved = {torch_internals.WAIT, torch.ops.aten.slice.Tensor, torch.ops.aten.reshape.default}
    for node in nodes:
        if node.target is torch_internals.WAIT and after.graph.output_node() not in node.users:
            between = nodes[nodes.index(node) + 1 : min(nodes.index(user) for user in node.users)]
            assert all(other.target in moved for other in between)


class Viewed(nn.Module):
    """Parameters of as many rows as there are ranks, read through views."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 4, 3))
        self.b = nn.Parameter(torch.randn(2, 2, 3))

    def forward(self, x):
        return (x @ self.a.view(8, 3).t()).square().sum() + (x @ self.b.view(4, 3).t()).sum()


def test_what_a_flat_gather_brings_lies_in_memory_as_a_gather_does():
    torch.manual_seed(0)
    model, batch = Viewed(), torch.randn(4, 3)
    before = compiled(model, batch, adamw(model), ranks=2, plan="zero3").programs["step"]
    after = merged(before)
    assert calls(after) < calls(before)
    inputs = values(model, batch, adamw(model))
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))


class Tables(nn.Module):
    """Two matrices of one row length, one of another, and biases."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 2), nn.Linear(4, 3)

    def forward(self, x):
        return (self.c(self.a(x)).sum(1) + self.b(x).sum(1)).square().mean()


def tables(monkeypatch, plan="ddp"):
    """(Program before, after) where every matrix is a table of its own row length."""
    change_sizes(monkeypatch, table=1)
    torch.manual_seed(0)
    model, batch = Tables(), torch.randn(6, 6)
    before = compiled(model, batch, adamw(model), ranks=2, plan=plan).programs["step"]
    after = merged(before)
    inputs = values(model, batch, adamw(model))
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(after)))
    return before, after


def test_tables_of_one_row_length_go_below_each_other(monkeypatch):
    before, after = tables(monkeypatch)
    assert_golden(__file__, "merge_small_collectives_tables", before, after)
    reduced = [
        list(node.args[0].meta["val"].shape)
        for node in after.operations()
        if node.target is torch_internals.ALL_REDUCE and node.meta["phase"] == BACKWARD
    ]
    assert [6, 6] in reduced  # of 4 and of 2 rows
    assert [9] in reduced  # the biases
    assert [3, 4] in reduced  # the only one of its length


def test_inductor_computes_matmuls_where_the_flat_collective_reads_them(monkeypatch):
    change_sizes(monkeypatch, table=1)
    model = Tables()
    placed = compiled(model, torch.randn(6, 6), adamw(model), ranks=2, plan="ddp").programs["step"]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        program = write_state_in_place(bind_to_rank(merged(placed), 0))
        program = name_groups(program, {"dp": dist.group.WORLD.group_name})
        with _generated_code() as sources:
            lower(program, LoweringDecision("inductor"), HOST)
    finally:
        dist.destroy_process_group()
    (source,) = sources
    (flat,) = re.findall(r"(buf\d+) = empty_strided_cpu\(\(6, 6\)", source)
    parts = re.findall(rf"(buf\d+) = reinterpret_tensor\({flat}, ", source)
    assert len(parts) == 2
    for part in parts:
        assert f"out={part})" in source


@pytest.mark.parametrize("plan", sampled(["zero3", "ddp"]))
def test_parameters_without_elements_are_merged_too(plan):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(0))
            self.c = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return (x * self.c).sum() + self.a.sum() + self.b.sum()

    model, batch = Empty(), torch.ones(2, 3, dtype=torch.float64)
    before = compiled(model, batch, adamw(model), ranks=2, plan=plan).programs["step"]
    inputs = values(model, batch, adamw(model))
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(bound(merged(before))))


@contextlib.contextmanager
def _generated_code():
    """The Python sources that inductor writes, as it writes them."""
    sources = []
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
        yield sources
