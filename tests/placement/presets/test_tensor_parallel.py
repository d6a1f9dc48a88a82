"""Tensor parallelism: Megatron's pairs, found from the graph."""

import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from stepgraph.placement.presets import beside_data as policies
from stepgraph.planning.plan import preset_plan
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.runtime.ranks import parse_mesh
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import ROWS, captured, mlp, notes_of, regression_batch, tiny_llama, token_batch

aten = torch.ops.aten
LAYERS = 2


def llama(**config):
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}
    return tiny_llama(LAYERS, **(settings | config))


def parameters_of(program):
    rows = zip(program.inputs, program.input_values, strict=True)
    return {role.name: value.placements for role, value in rows if hasattr(role, "name")}


def step_of(model, batch, mesh, plan):
    made = preset_plan(plan, parse_mesh(mesh), schedule="none")
    run = OneProcessRun(model, mesh=mesh, plan=made)
    run.step(batch)
    return run.programs["step"], run


def product_flops(program):
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    found = [n for n in program.operations() if n.target in products]
    return sum(2 * n.meta["val"].numel() * n.args[-2].meta["val"].shape[-1] for n in found)


def test_columns_rows_and_vocabulary_are_cut():
    program, run = step_of(llama(), token_batch(), "tp=2", "tp")
    cut = {name: p[0] for name, p in parameters_of(program).items() if isinstance(p[0], Shard)}
    layer = {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj"], Shard(0)),
        "o_proj": Shard(1),
        **dict.fromkeys(["gate_proj", "up_proj"], Shard(0)),
        "down_proj": Shard(1),
    }
    expected = {"model.embed_tokens.weight": Shard(0), "lm_head.weight": Shard(0)}
    for number in range(LAYERS):
        for name, placement in layer.items():
            room = "self_attn" if name[0] in "qkvo" else "mlp"
            expected[f"model.layers.{number}.{room}.{name}.weight"] = placement
    assert cut == expected
    assert notes_of(run) == []


def test_names_are_not_looked_at():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(8, 16)  # what the names say is not what they do
            self.down_proj = nn.Linear(16, 8)

        def forward(self, x):
            return (self.down_proj(torch.relu(self.q_proj(x))) + x).square().mean()

    program, _ = step_of(Block(), (torch.randn(4, 8),), "tp=2", "tp")
    assert {
        name: p[0] for name, p in parameters_of(program).items() if isinstance(p[0], Shard)
    } == {
        "q_proj.weight": Shard(0),
        "q_proj.bias": Shard(0),
        "down_proj.weight": Shard(1),
    }


def test_a_layer_reduces_activations_twice_forward_and_twice_backward():
    program, _ = step_of(llama(), token_batch(), "tp=2", "tp")
    activations = [
        (node.meta["phase"], KINDS[node.target])
        for node in program.operations()
        if is_collective(node) and node.meta["val"].dim() == 3
    ]
    forward, backward = ("forward", "all_reduce"), ("backward", "all_reduce")
    # One more each way: the embedding, and the input of the vocabulary's projection.
    assert activations == [forward] * (2 * LAYERS + 1) + [backward] * (2 * LAYERS + 1)
    others = [n for n in program.operations() if is_collective(n) and n.meta["val"].dim() != 3]
    tokens = ROWS * 8
    assert all(node.meta["val"].numel() <= tokens for node in others)


@pytest.mark.parametrize(
    ("mesh", "share"), sampled([("dp=3,tp=2", 6), ("tp=2", 2), ("dp=2,tp=2", 4)], every=3)
)
def test_products_are_divided_over_all_ranks(mesh, share):
    whole, _ = step_of(llama(), token_batch(), "dp=1", "ddp")
    program, _ = step_of(llama(), token_batch(), mesh, "tp")
    assert product_flops(program) == product_flops(whole) / share


def test_zero_cuts_another_dimension_than_tensor_parallelism():
    program, _ = step_of(llama(), token_batch(), "dp=2,tp=2", "tp+zero3")
    placements = parameters_of(program)
    assert placements["model.layers.0.mlp.up_proj.weight"] == (Shard(1), Shard(0))
    assert placements["model.layers.0.mlp.down_proj.weight"] == (Shard(0), Shard(1))


@pytest.mark.parametrize("seed", sampled(range(6), every=6))
@pytest.mark.parametrize("plan", sampled(["tp+zero3", "tp+zero2"]))
def test_any_part_of_the_layout_gives_the_same_gradients(seed, plan, monkeypatch):
    """Whole and cut weights may meet in every way."""
    find, chance = policies.find_layout, random.Random(seed)

    def some_of_it(program, ranks, others, known):
        if known:
            return find(program, ranks, others, known)
        layout = find(program, ranks, others, known)
        return {name: layout[name] for name in layout if chance.random() < 0.5}

    def trained(mesh, plan):
        model = llama()
        run = OneProcessRun(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            plan=plan,
            max_grad_norm=0.5,
        )
        return [run.step(token_batch()).item() for _ in range(2)], run.parameters()

    losses, expected = trained("dp=1", "ddp")
    monkeypatch.setattr(policies, "find_layout", some_of_it)
    got, parameters = trained("dp=2,tp=2", plan)
    assert got == pytest.approx(losses, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-7)


def test_a_cut_that_would_be_gathered_on_its_way_is_given_up():
    class Softmaxed(nn.Module):
        """The first product's result is normalised over what would be cut, and sorted."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.second(self.first(x).sort(-1).values).square().mean()

    program, run = step_of(Softmaxed(), (torch.randn(4, 8),), "tp=2", "tp")
    assert parameters_of(program)["first.weight"] == parameters_of(program)["first.bias"]
    assert not isinstance(parameters_of(program)["first.weight"][0], Shard)
    assert any("first.weight" in note for note in notes_of(run))


def test_sizes_that_divide_over_no_ranks_stay_whole():
    """Widths of 5, 7 and 3."""
    _, alone = step_of(mlp(), regression_batch(), "dp=1", "ddp")
    _, run = step_of(mlp(), regression_batch(), "tp=2", "tp")
    assert notes_of(alone) == [] and len(notes_of(run)) == 1


def test_what_another_program_has_cut_stays_cut_so():
    """Its parts are stored, and in the arguments of programs that were compiled before."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.two(self.one(x).relu()).square().mean()

    program = captured(Pair(), torch.randn(4, 8))
    found = policies.find_layout(program, 2, 1, {})
    assert found == {"one.weight": Shard(0), "two.weight": Shard(1)}
    known = {"one.weight": Shard(1)}
    assert policies.find_layout(program, 2, 1, known)["one.weight"] == Shard(1)
