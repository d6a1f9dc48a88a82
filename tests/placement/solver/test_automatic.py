"""``auto``: its objective is what the placed step costs, it is the optimum, and it finds what is known."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from stepgraph.cost.collectives import collective_of
from stepgraph.cost.devices import Link
from stepgraph.errors import BudgetError
from stepgraph.placement.presets import named as policies
from stepgraph.placement.solver.automatic import decide_automatically
from stepgraph.placement.solver.optimise import _of_memory, solve
from stepgraph.placement.solver.room import Room
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.layout import show
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.planned import TOYS, global_step, place, recounted, toy
from tests.sampling import sampled
from tests.support import adamw, tiny_llama

MESHES = ["dp=2", "tp=2", "dp=2,tp=2"]


class Chain(nn.Module):
    """Linear layers with an activation in between, and a squared error."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x, y):
        for i, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if i else x)
        return (x - y).square().mean()


def chain(*widths: int, rows: int = 8):
    torch.manual_seed(0)
    return Chain(*widths), (torch.randn(rows, widths[0]), torch.randn(rows, widths[-1]))


def llama(layers: int):
    ids = torch.arange(8 * 16).reshape(8, 16) % 32
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    return tiny_llama(layers, **heads), {"input_ids": ids, "labels": ids}


def gpt2(layers: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = torch.arange(8 * 16).reshape(8, 16) % 32
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False)), {
        "input_ids": ids,
        "labels": ids,
    }


def convolutional(layers: int):
    torch.manual_seed(0)
    parts = []
    for i in range(layers):
        parts += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()]
    body = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 16, 4))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, x, y):
            return nn.functional.mse_loss(self.body(x), y)

    return Net(), (torch.randn(8, 3, 4, 4), torch.randn(8, 4))


# ------------------------------------------------------------------------------ it is the optimum


@pytest.mark.parametrize(
    ("device", "mesh"), sampled(itertools.product(["slow math", "slow links"], MESHES))
)
def test_no_placement_of_a_small_step_is_better(mesh, device):
    """Every placement of what matters is carried out and counted; what a choice costs is counted right."""
    model, batch = chain(8, 4)
    program = global_step(model, batch, mesh)
    best = place(program.copy(), mesh, TOYS[device])
    problem = best.model.problem
    least = best.solution.cost
    choices = list(itertools.product(*(range(len(b.cost)) for b in problem.blocks)))
    costs = [problem.cost(choice) for choice in choices[:: max(1, len(choices) // 3000)]]
    assert least <= min(costs) * (1 + 1e-9)
    possible = [c for c in choices[:: max(1, len(choices) // 40)] if problem.cost(c) < 1]
    assert possible
    for chosen in possible[:12]:
        other = place(program.copy(), mesh, TOYS[device], chosen=list(chosen))
        total = sum(recounted(other).values())
        assert total == pytest.approx(problem.cost(chosen)), chosen
        assert total >= least * (1 - 1e-9)


# -------------------------------------------------------------- it is what the placed step costs


def assert_counted_right(model, batch, mesh, device, tolerance=1e-9, memory="none"):
    planned = place(global_step(model, batch, mesh), mesh, TOYS[device], memory=memory)
    assert planned.solution.gap <= 1e-5
    total = sum(recounted(planned).values())
    assert total == pytest.approx(planned.solution.cost, rel=tolerance)
    return planned.solution.cost, total


@pytest.mark.parametrize(("mesh", "device"), sampled(list(itertools.product(MESHES, TOYS))))
def test_the_objective_is_what_the_placed_step_costs(mesh, device):
    assert_counted_right(*chain(8, 16, 16, 8), mesh, device)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_layers_that_share_a_choice_are_all_counted(make, layers):
    for device in ("slow math", "slow links"):
        assert_counted_right(*make(layers), "dp=2,tp=2", device)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["slow links", "slow math"])
def test_what_is_recomputed_is_counted_again(device):
    """But for what is recomputed only to be exchanged: that is counted, and not done."""
    assert_counted_right(*llama(2), "dp=2,tp=2", device, tolerance=1e-4, memory="full")
    assert_counted_right(*chain(8, 16, 16, 8), "dp=2,tp=2", device, tolerance=0.03, memory="full")


def test_each_further_layer_costs_the_same():
    costs = [assert_counted_right(*chain(*[8] * n), "dp=2", "balanced")[0] for n in (4, 5, 7)]
    assert costs[2] - costs[1] == pytest.approx(2 * (costs[1] - costs[0]))


@pytest.mark.slow
@pytest.mark.parametrize("device", TOYS)
def test_a_convolutional_step_is_counted_right(device):
    assert_counted_right(*convolutional(2), "dp=2", device)


# -------------------------------------------------------------- nothing is left of other meshes

SCRIPT = """
import sys
from tests.placement.solver.test_automatic import planned_on
for mesh in sys.argv[1:]:
    print(planned_on(mesh))
"""


def planned_on(mesh: str) -> str:
    planned = place(global_step(*chain(16, 32, 16), mesh), mesh, TOYS["slow links"])
    operations = [str(node.meta["placements"]) for node in planned.placed.operations()]
    stored = {name: show(p) for name, p in planned.stored.items()}
    return f"{mesh} {planned.solution.cost!r} {stored} {operations}"


@pytest.mark.slow
def test_meshes_planned_one_after_the_other_are_planned_as_alone():
    meshes = ["dp=4,tp=2", "dp=2,tp=4", "dp=8"]
    here = [planned_on(mesh) for mesh in meshes]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SCRIPT, *reversed(meshes)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == here[::-1]
    assert [planned_on(mesh) for mesh in meshes] == here


# ------------------------------------------------------------------- presets are special cases


@pytest.mark.parametrize(
    ("mesh", "preset", "constraints"),
    [
        ("dp=2", "zero3", {"dp": "zero3"}),
        ("dp=2", "ddp", {"dp": "ddp"}),
        ("tp=2", "tp", {"tp": "tp"}),
        ("dp=2,tp=2", "tp+zero3", {"dp": "zero3", "tp": "tp"}),
    ],
)
def test_a_forced_preset_is_the_preset(mesh, preset, constraints):
    model, batch = chain(8, 16, 8)
    program = global_step(model, batch, mesh, adamw(model))
    forced = place(program.copy(), mesh, TOYS["balanced"], constraints)
    decision = policies.decide_by_preset(program, parse_mesh(mesh), preset)
    found = forced.plan.decisions["step"].placement
    assert found.inputs == decision.inputs
    assert found.outputs == decision.outputs
    assert found.operations == decision.operations


def test_what_a_group_adds_up_is_added_up_for_all_who_read_it():
    """A residual stream under ``tp``: the sum is taken before it is added up, and two groups read it."""
    program = global_step(*llama(2), "tp=2")
    forced = place(program, "tp=2", TOYS["slow memory"], {"tp": "tp"}, memory="full")
    decision = forced.plan.decisions["step"].placement
    for name in ("model.layers.0/add", "model.layers.1/add"):
        assert decision.operations[name].outputs == ((Partial("sum"),),)
    reductions = [n for n in forced.placed.operations() if KINDS.get(n.target) == "all_reduce"]
    after = [n for n in reductions if "model.layers.1/" in n.meta["name"]]
    assert len(after) == 2, "one behind each sum"
    assert sum(recounted(forced).values()) == pytest.approx(forced.solution.cost)


@pytest.mark.slow
def test_what_a_group_adds_up_counts_once_against_a_limit():
    """What a plan takes is a budget that it fits; what groups keep is in it."""
    program = global_step(*llama(2), "tp=2")
    asked = {"constraints": {"tp": "tp"}, "memory": "full"}
    free = place(program.copy(), "tp=2", TOYS["slow memory"], **asked)
    needs = free.model.problem.memory(free.solution.chosen)
    again = place(program, "tp=2", TOYS["slow memory"], memory_limit=int(needs) + 1, **asked)
    assert again.solution.cost == pytest.approx(free.solution.cost)
    forward = [n for n in free.placed.operations() if n.meta["phase"] == "forward"]
    sums = [n.meta["val"] for n in forward if KINDS.get(n.target) == "all_reduce"]
    stream = sum(value.nbytes for value in sums if value.dim() == 3)
    chosen = zip(free.model.choices, free.solution.chosen, strict=True)
    kept = [c.block.memory[o] for c, o in chosen if c.groups and c.block.memory is not None]
    assert sum(kept) >= stream > 0


def test_what_is_added_up_for_nobody_in_the_forward_is_hidden():
    """A loss is read by its backward nowhere: the sum over ranks of its quotient waits for no one."""
    fast = dataclasses.replace(TOYS["slow links"], overlaps=True)
    placed = place(global_step(*llama(1), "dp=2"), "dp=2", fast)
    (loss,) = [link for link in placed.model.problem.links if link.name == "div"]
    assert loss.runs is not None and loss.runs.max() > 0


# ---------------------------------------------------------------------------- known optima


def test_weights_far_smaller_than_activations_leave_activations_where_they_are():
    device = toy("toy", 1e9, 1e12, 1e9)
    model, batch = chain(8, 16, 8, rows=4096)
    planned = place(global_step(model, batch, "dp=4", adamw(model)), "dp=4", device)
    weights = sum(p.numel() * 4 for p in model.parameters())
    moved = [collective_of(n)[1] for n in planned.placed.operations() if is_collective(n)]
    assert sum(moved) <= 4 * weights  # gradients and weights, and no activation
    decision = planned.plan.decisions["step"].placement
    made = [choice.outputs[0] for choice in decision.operations.values()]
    assert (Shard(0),) in made


def test_weights_that_do_not_fit_are_cut():
    device = toy("toy", 1e9, 1e12, 1e13)
    model, batch = chain(256, 256, 256, rows=256)
    program = global_step(model, batch, "dp=4", adamw(model))
    free = place(program.copy(), "dp=4", device)
    least = solve(_of_memory(free.model.problem), goal=0.0).cost
    limit = int(least * 1.02)
    planned = place(program.copy(), "dp=4", device, memory_limit=limit)
    assert all(isinstance(p, Shard) for (p,) in planned.stored.values())
    problem = planned.model.problem
    assert problem.memory(planned.solution.chosen) <= limit * (1 + 1e-6)
    assert problem.memory(free.solution.chosen) > limit
    assert planned.solution.cost >= free.solution.cost
    with pytest.raises(BudgetError, match="at least"):
        place(program.copy(), "dp=4", device, memory_limit=int(least * 0.98))


def test_a_program_is_formulated_once_for_all_limits():
    program, mesh, room = global_step(*llama(1), "dp=2"), parse_mesh("dp=2"), Room(2**30)
    asked = program, mesh, TOYS["balanced"]
    free = decide_automatically(*asked, room=room)
    with pytest.raises(BudgetError):
        decide_automatically(*asked, room=dataclasses.replace(room, limit=free.held_bytes // 2))
    for part in (0.99, 0.95, 0.97):
        limit = int(free.held_bytes * part)
        found = decide_automatically(*asked, room=dataclasses.replace(room, limit=limit))
        assert found.held_bytes <= limit
        assert (found.optimality_gap or 0.0) <= 0.01
    assert len(room.solvers) == 1


def test_slow_links_between_nodes_are_left_to_data_parallelism():
    """Few rows, links that are fast inside the node alone: weights are cut over its ranks."""
    device = toy("toy", 1e9, 1e9, 1e11, inter=Link(0.0, 1e6), ranks_per_node=4)
    model, batch = chain(64, 128, 64, rows=4)
    mesh = "dp=2,tp=4"
    planned = place(global_step(model, batch, mesh, adamw(model)), mesh, device)
    assert all(isinstance(tensor, Shard) for _, tensor in planned.stored.values())
    wide = [
        (node.meta["val"].numel(), node.meta["name"])
        for node in planned.placed.operations()
        if getattr(node.target, "__name__", "").startswith("all_")
        and node.args[-1] == "dp"
    ]  # fmt: skip
    weights = sum(p.numel() for p in model.parameters())
    assert sum(size for size, _ in wide) <= weights  # no more than reductions of gradients
