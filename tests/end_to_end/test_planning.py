"""One plan, three readers: made without any ranks, it is what Engine and parallelize run on them."""

import os

import pytest
import torch.distributed as dist

import stepgraph
from stepgraph.frontends.launcher import launch
from stepgraph.program import roles
from tests.end_to_end.training import adamw, llama_batch, tiny_llama

LAYERS = 1


def make_plan(path, mesh, placement, **options):
    settings = {"memory": "full", "compute_dtype": None} | options
    made = stepgraph.plan(
        tiny_llama(LAYERS),
        example=llama_batch(0),
        mesh=mesh,
        placement=placement,
        optimizer=adamw(tiny_llama(LAYERS).parameters()) if False else "adamw",
        **settings,
    )
    made.save(path)
    return made


def part(batch, ranks, rank):
    return {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}


def losses_of_one_process(compute_dtype=None, steps=2):
    engine = stepgraph.Engine(
        model := tiny_llama(LAYERS),
        optimizer=adamw(model.parameters()),
        lowering="eager",
        compute_dtype=compute_dtype,
    )
    return [engine.step(llama_batch(step)).item() for step in range(steps)]


def refuse(*args):
    raise AssertionError("decided again")


def run_the_plan(path):
    """One rank: Engine steps on the plan file, and what it runs is what was planned."""
    from stepgraph import pipeline

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipeline.placement_policies.decide = refuse
    model = tiny_llama(LAYERS)
    planned = stepgraph.Plan.load(path)
    mesh = planned.mesh
    engine = stepgraph.Engine(
        model, optimizer=adamw(model.parameters()), mesh=str(mesh), plan=path, lowering="eager"
    )
    data = mesh.data_rank(rank), mesh.data_size
    losses = [engine.step(part(llama_batch(s), data[1], data[0])).item() for s in range(2)]
    stored = {
        role.name: value.placements
        for role, value in zip(
            engine.programs["step"].inputs, engine.programs["step"].input_values, strict=True
        )
        if isinstance(role, roles.Param)
    }
    assert stored == planned.parameters() and ranks == mesh.world_size
    return losses, engine.plan.memory


def run_all(paths):
    return [run_the_plan(path) for path in paths]


def test_a_plan_made_without_ranks_is_what_real_ranks_run(tmp_path):
    paths = []
    for mesh, placement in (("dp=2", "zero3"), ("tp=2", "tp"), ("dp=2", "zero1")):
        paths.append(str(tmp_path / f"{placement}.json"))
        make_plan(paths[-1], mesh, placement)
    assert not dist.is_initialized()
    expected = losses_of_one_process()
    for results in launch(run_all, paths, ranks=2):
        for losses, memory in results:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert memory == "full"
