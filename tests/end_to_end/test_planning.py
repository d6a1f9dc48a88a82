"""One plan, three readers: made without any ranks, it is what Engine and parallelize run on them."""

import os

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import pipeline
from stepgraph.errors import PlanError
from stepgraph.frontends.launcher import launch
from stepgraph.program import roles
from tests.end_to_end.training import adamw, llama_batch, tiny_llama

LAYERS, STEPS = 1, 2
TOLERANCE = 1e-5


def make_plan(path, mesh, placement, **options):
    settings = {"memory": "full", "compute_dtype": None} | options
    example = llama_batch(0)
    made = stepgraph.plan(
        tiny_llama(LAYERS), example=example, mesh=mesh, placement=placement, **settings
    )
    made.save(path)
    return str(path)


def part(batch, mesh):
    index = mesh.data_rank(int(os.environ["RANK"])) if dist.is_initialized() else 0
    return {name: tensor.chunk(mesh.data_size)[index] for name, tensor in batch.items()}


def whole_losses(compute_dtype=None):
    model = tiny_llama(LAYERS)
    engine = stepgraph.Engine(
        model, optimizer=adamw(model.parameters()), lowering="eager", compute_dtype=compute_dtype
    )
    return [engine.step(llama_batch(step)).item() for step in range(STEPS)]


def refuse(*args):
    raise AssertionError("decided again")


def step_by_the_plan(path):
    """Engine replays the file: it decides nothing, and stores parameters where the plan says."""
    planned, decide = stepgraph.Plan.load(path), pipeline.placement_policies.decide
    model = tiny_llama(LAYERS)
    pipeline.placement_policies.decide = refuse
    try:
        engine = stepgraph.Engine(
            model,
            optimizer=adamw(model.parameters()),
            mesh=str(planned.mesh),
            plan=path,
            lowering="eager",
        )
        losses = [engine.step(part(llama_batch(s), planned.mesh)).item() for s in range(STEPS)]
    finally:
        pipeline.placement_policies.decide = decide
    step = engine.programs["step"]
    stored = {
        role.name: value.placements
        for role, value in zip(step.inputs, step.input_values, strict=True)
        if isinstance(role, roles.Param)
    }
    assert stored == planned.parameters()
    assert engine.plan.memory == "full"
    return losses


def loop_by_the_plan(path, compiled):
    """A loop of one's own over the same file, under torch.compile or not."""
    planned = stepgraph.Plan.load(path)
    model = stepgraph.parallelize(
        tiny_llama(LAYERS),
        mesh=str(planned.mesh),
        plan=path,
        example=llama_batch(0),
        loss=lambda model, batch: model(**batch).loss,
        lowering="eager",
    )
    optimizer = adamw(model.parameters())
    run = torch.compile(model, backend="stepgraph") if compiled else model
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run(part(llama_batch(step), planned.mesh))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    where = planned.parameters()
    assert all(tuple(p.placements) == where[name] for name, p in model.named_parameters())
    return losses


def read_three_times(paths):
    found = [step_by_the_plan(path) for path in paths]
    return found + [loop_by_the_plan(paths[0], compiled) for compiled in (False, True)]


def test_a_plan_made_without_ranks_is_what_real_ranks_run(tmp_path):
    cells = (("dp=2", "zero3"), ("tp=2", "tp+sp"), ("dp=2", "zero1"))
    paths = [make_plan(tmp_path / f"{preset}.json", mesh, preset) for mesh, preset in cells]
    assert not dist.is_initialized()
    expected = whole_losses()
    for results in launch(read_three_times, paths, ranks=2):
        assert len(results) == len(paths) + 2
        for losses in results:
            assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_a_plan_brings_the_type_it_computes_in(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3", compute_dtype=torch.bfloat16)
    assert step_by_the_plan(path) == whole_losses(torch.bfloat16)
    assert step_by_the_plan(path) != whole_losses()


def engine_of(model, path, **options):
    optimizer = adamw(model.parameters())
    return stepgraph.Engine(model, optimizer=optimizer, plan=path, lowering="eager", **options)


def test_a_plan_of_another_model_is_refused_before_anything_is_changed(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    model = tiny_llama(2)
    kinds = [type(parameter) for parameter in model.parameters()]
    with pytest.raises(PlanError, match="does not know parameters: model.layers.1"):
        engine_of(model, path)
    assert [type(parameter) for parameter in model.parameters()] == kinds


def test_a_plan_for_another_step_says_what_it_was_made_for(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    engine = engine_of(tiny_llama(LAYERS), path, max_grad_norm=1.0)
    with pytest.raises(PlanError, match=r"do not fit this model\n.*made for h100; .*adamw"):
        engine.step(llama_batch(0))


@pytest.mark.parametrize(
    ("placement", "message"),
    [("S(7)", "there is no dimension 7"), ("RR", "1 placements|2 placements")],
)
def test_placements_that_cannot_be_are_refused(tmp_path, placement, message):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"S(0) S(0) -> S(0)"', f'"{placement} R -> R"'))
    with pytest.raises(PlanError, match=message):
        engine_of(tiny_llama(LAYERS), path).step(llama_batch(0))
