"""Tensor parallelism and hybrid sharding, alone and together, give the run of one process."""

import os

import pytest

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.check import check_model
from stepgraph.errors import MeshError, UsageError
from stepgraph.program import roles
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.mesh_cells import ALL, PAIRS, VOCABULARY, Cell, run_in_one_process
from tests.end_to_end.models import bring
from tests.end_to_end.training import CLIP, STEPS, adamw, compare, llama_batch, tiny_llama
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import notes_of

# The dimensions of a mesh may come in any order.
TURNED = [
    Cell("zero3", "tp=2,dp=2"),
    Cell("hsdp", "shard=2,replicate=4", micro_batches=2),
    Cell("tp+sp+zero3", "tp=2,dp=2", "full", micro_batches=2),
]


# Of presets with sequence parallelism and without, both on four ranks, one each on two and on eight.
IN_CI = [
    cell
    for cell in PAIRS
    if cell.plan == "hsdp" or cell.shape.world_size != (2 if "+sp" in cell.plan else 8)
]


@pytest.mark.parametrize("cell", sampled(IN_CI + TURNED, every=13), ids=str)
def test_ten_steps_equal_plain_pytorch(cell):
    assert notes_of(run_in_one_process(cell)) == []


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in ALL if cell not in IN_CI], ids=str)
def test_every_setting_with_every_other(cell):
    assert notes_of(run_in_one_process(cell)) == []


@pytest.mark.parametrize(("plan", "mesh"), sampled([("tp+zero3", "dp=2,tp=4"), ("tp", "tp=2")]))
def test_heads_and_a_vocabulary_that_do_not_divide_stay_whole_and_are_reported(plan, mesh):
    """Two key-value heads over four ranks; 101 words over any."""
    model = tiny_llama()
    run = OneProcessRun(
        model, optimizer=adamw(model.parameters()), mesh=mesh, plan=plan, max_grad_norm=CLIP
    )
    losses = [run.step(llama_batch(step)).item() for step in range(STEPS)]
    compare(losses, run.parameters())
    (note,) = [note for note in notes_of(run) if note.startswith("tp keeps")]
    assert "model.embed_tokens.weight" in note
    assert ("k_proj" in note) == ("tp=4" in mesh)
    assert "q_proj" not in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh"), sampled([("tp+zero2", "dp=2,tp=2"), ("hsdp", "replicate=2,shard=2")])
)
def test_the_checker_follows_every_pass(plan, mesh):
    model = tiny_llama(vocabulary=VOCABULARY)
    report = check_model(
        model,
        entries=("step",),
        optimizer=adamw(model.parameters()),
        batch=llama_batch(0),
        mesh=mesh,
        plan=plan,
        memory="full",
        micro_batches=2,
        max_grad_norm=CLIP,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", sampled(["tp+zero2", "tp+zero3", "tp+sp+zero3"], every=2))
def test_the_bias_of_queries_keys_and_values_in_one_adds_up_over_micro_batches(plan):
    """It is read in three blocks: no shard of rows lies within one of them."""
    model, batch = (brought := bring("gpt2", dropout=False)).model, brought.batch
    optimizer = adamw(model.parameters())
    how = {"mesh": "dp=2,tp=2", "plan": plan, "micro_batches": 2}
    report = check_model(model, entries=("step",), optimizer=optimizer, batch=batch, **how)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("plan", "mesh", "problem"),
    [
        ("hsdp", "dp=4", "lacks replicate, shard"),
        ("tp+zero3", "dp=4", "lacks tp"),
        ("zero3", "tp=4", "lacks dp"),
        ("zero3", "dp=2,shard=2", "has shard besides"),
    ],
)
def test_a_preset_that_names_a_missing_dimension_is_an_error(plan, mesh, problem):
    model = tiny_llama()
    with pytest.raises(MeshError, match=problem):
        OneProcessRun(model, mesh=mesh, plan=plan).step(llama_batch(0))


@pytest.mark.parametrize("plan", ["tp+zero4", "tp+zero3+ddp", "tp+tp"])
def test_a_preset_that_cannot_be_meant_is_an_error(plan):
    with pytest.raises(UsageError):
        OneProcessRun(tiny_llama(), mesh="dp=2,tp=2", plan=plan).step(llama_batch(0))


def train(plan, mesh, evaluate_first):
    """One rank of a run; returns losses, whole parameters, a state dict and placements."""
    shape, rank = parse_mesh(mesh), int(os.environ["RANK"])
    model = tiny_llama(vocabulary=VOCABULARY)
    engine = stepgraph.Engine(
        model,
        optimizer=adamw(model.parameters()),
        mesh=mesh,
        plan=plan,
        max_grad_norm=CLIP,
        lowering="eager",
    )
    kept = {name: id(p) for name, p in engine.model.named_parameters()}

    def part(step):
        whole = llama_batch(step)
        return {k: v.chunk(shape.data_size)[shape.data_rank(rank)] for k, v in whole.items()}

    before = engine.evaluate(part(0)).item() if evaluate_first else None
    losses = [engine.step(part(step)).item() for step in range(STEPS)]
    if evaluate_first:
        assert abs(before - losses[0]) < 1e-5
    parameters = dict(engine.model.named_parameters())
    assert {name: id(p) for name, p in parameters.items()} == kept
    stored = {name: str(tuple(p.placements)) for name, p in parameters.items()}
    for name, parameter in parameters.items():  # what the user sees is what the program holds
        assert parameter.to_local().shape == engine._state.tensors[roles.Param(name)].shape
    whole = {name: p.detach().full_tensor() for name, p in parameters.items()}
    assert all(p.grad is None for p in parameters.values())
    state = {name: value.full_tensor() for name, value in engine.state_dict().items()}
    return losses, whole, state, stored


def train_one_after_the_other(cells):
    return [train(*cell) for cell in cells]


@pytest.mark.parametrize(
    "cells",
    [
        # Under inductor two ranks are in `make test` too.
        pytest.param([("tp", "tp=2", True)], marks=pytest.mark.slow),
        [("tp+zero3", "dp=2,tp=2", False), ("hsdp", "replicate=2,shard=2", True)],
    ],
    ids=["two", "four"],
)
@pytest.mark.slow
def test_real_ranks(cells):
    """Losses and parameters are plain PyTorch's; the state dict loads into a plain model."""
    ranks = parse_mesh(cells[0][1]).world_size
    for results in launch(train_one_after_the_other, cells, ranks=ranks):
        for (plan, _, _), (losses, parameters, state, stored) in zip(cells, results, strict=True):
            compare(losses, parameters, VOCABULARY)
            model = tiny_llama(vocabulary=VOCABULARY)
            model.load_state_dict(state)
            compare(losses, dict(model.named_parameters()), VOCABULARY)
            if "tp" in plan:
                assert "Shard(dim=0)" in stored["model.layers.0.self_attn.q_proj.weight"]
