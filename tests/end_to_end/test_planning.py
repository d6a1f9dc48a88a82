"""One plan, three readers: made without any ranks, it is what Engine and parallelize run on them."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import stepgraph
from stepgraph import pipeline
from stepgraph.cli.launcher import launch
from stepgraph.errors import GraphBreakError, PlanError
from stepgraph.program import roles
from stepgraph.program.collectives import KINDS, is_collective
from tests.support import adamw, stored_parameters

ROWS, STEPS = 8, 3
TOLERANCE = 1e-5


class Blocks(nn.Module):
    """Two residual blocks and a loss; with ``breaks``, the same parameters and a graph break."""

    def __init__(self, width=8, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.ups = nn.ModuleList(nn.Linear(width, 16) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(16, width) for _ in range(2))
        self.breaks = breaks

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
            if self.breaks:
                print(end="")
        return x.square().mean()


def batch(seed):
    return {"x": torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))}


def make_plan(path, mesh, placement, **options):
    settings = {"memory": "full", "compute_dtype": None} | options
    made = stepgraph.plan(Blocks(), example=batch(0), mesh=mesh, placement=placement, **settings)
    made.save(path)
    return str(path)


def part(seed, mesh):
    index = mesh.data_rank(int(os.environ["RANK"])) if dist.is_initialized() else 0
    return {name: tensor.chunk(mesh.data_size)[index] for name, tensor in batch(seed).items()}


def whole_losses(compute_dtype=None):
    model = Blocks()
    engine = stepgraph.Engine(
        model, optimizer=adamw(model), lowering="eager", compute_dtype=compute_dtype
    )
    return [engine.step(batch(step)).item() for step in range(STEPS)]


def refuse(*args, **kwargs):
    raise AssertionError("decided again")


def step_by_the_plan(path):
    """Engine replays the file: it decides nothing, and stores parameters where the plan says."""
    planned, model = stepgraph.Plan.load(path), Blocks()
    with pytest.MonkeyPatch.context() as patch:
        for room in ("placement", "memory"):
            patch.setattr(pipeline, f"decide_{room}", refuse)
        patch.setattr(pipeline.schedule, "decide_and_apply", refuse)
        engine = stepgraph.Engine(
            model,
            optimizer=adamw(model),
            mesh=str(planned.mesh),
            plan=path,
            lowering="eager",
        )
        losses = [engine.step(part(s, planned.mesh)).item() for s in range(STEPS)]
    step = engine.programs["step"]
    stored = {
        role.name: value.placements
        for role, value in zip(step.inputs, step.input_values, strict=True)
        if isinstance(role, roles.Param)
    }
    assert stored == stored_parameters(planned)
    assert engine.plan.memory == "full"
    return losses


def loop_by_the_plan(path, compiled):
    """A loop of one's own over the same file, under torch.compile or not."""
    planned = stepgraph.Plan.load(path)
    model = stepgraph.parallelize(
        Blocks(),
        mesh=str(planned.mesh),
        plan=path,
        example=batch(0),
        loss=lambda model, given: model(**given),
        lowering="eager",
    )
    optimizer = adamw(model)
    run = torch.compile(model, backend="stepgraph") if compiled else model
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run(part(step, planned.mesh))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    where = stored_parameters(planned)
    assert all(tuple(p.placements) == where[name] for name, p in model.named_parameters())
    return losses


def read_three_times(paths):
    found = [step_by_the_plan(path) for path in paths]
    return found + [loop_by_the_plan(paths[0], compiled) for compiled in (False, True)]


@pytest.mark.slow
def test_a_plan_made_without_ranks_is_what_real_ranks_run(tmp_path):
    cells = (("dp=2", "zero3"), ("tp=2", "tp"), ("dp=2", "zero1"))
    paths = [make_plan(tmp_path / f"{preset}.json", mesh, preset) for mesh, preset in cells]
    assert not dist.is_initialized()
    expected = whole_losses()
    for results in launch(read_three_times, paths, ranks=2):
        assert len(results) == len(paths) + 2
        for losses in results:
            assert losses == pytest.approx(expected, rel=TOLERANCE)


def found_by_the_solver(paths):
    """Plans that a solver made, from files; and one that it makes on the ranks themselves."""
    found = [step_by_the_plan(path) for path in paths]
    found += [loop_by_the_plan(path, compiled) for path in paths[:1] for compiled in (False, True)]
    model = Blocks()
    engine = stepgraph.Engine(
        model, optimizer=adamw(model), mesh="dp=2", plan="auto", memory="full", lowering="eager"
    )
    return [*found, [engine.step(part(step, engine.plan.mesh)).item() for step in range(STEPS)]]


@pytest.mark.slow
def test_auto_is_what_real_ranks_run(tmp_path):
    asked = (
        ("dp=2", {"dp": "zero3"}),
        ("tp=2", {"tp": "tp"}),
        ("dp=2", {"ups.*.weight": "S(1)"}),
        ("dp=2", {}),
    )
    paths = [
        make_plan(tmp_path / f"{i}.json", mesh, "auto", constraints=constraints)
        for i, (mesh, constraints) in enumerate(asked)
    ]
    forced = stored_parameters(stepgraph.Plan.load(paths[0]))["ups.0.weight"]
    assert forced == (Shard(0),)
    expected = whole_losses()
    for results in launch(found_by_the_solver, paths, ranks=2):
        assert len(results) == len(paths) + 3
        for losses in results:
            assert losses == pytest.approx(expected, rel=TOLERANCE)


def exchange(path, lowering):
    """(losses, kinds of collectives)."""
    model = Blocks()
    engine = stepgraph.Engine(
        model, optimizer=adamw(model), mesh="dp=2", plan=path, lowering=lowering
    )
    losses = [engine.step(part(step, engine.plan.mesh)).item() for step in range(STEPS)]
    step = engine.programs["step"]
    return losses, [KINDS[n.target] for n in step.operations() if is_collective(n)]


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_ranks_that_cut_another_dimension_exchange_parts(tmp_path, lowering):
    asked = {"ups.0/output": "S(0)", "relu": "S(1)"}
    path = make_plan(tmp_path / "p.json", "dp=2", "auto", constraints=asked)
    expected = whole_losses()
    for losses, kinds in launch(exchange, path, lowering, ranks=2):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert "all_to_all" in kinds


@pytest.mark.slow
def test_a_plan_brings_the_type_it_computes_in(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3", compute_dtype=torch.bfloat16)
    assert step_by_the_plan(path) == whole_losses(torch.bfloat16)
    assert step_by_the_plan(path) != whole_losses()


def engine_of(model, path, **options):
    optimizer = adamw(model)
    mesh = str(stepgraph.Plan.load(path).mesh)
    return stepgraph.Engine(
        model, optimizer=optimizer, plan=path, mesh=mesh, lowering="eager", **options
    )


def test_a_plan_of_another_model_is_refused_before_anything_is_changed(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    model = Blocks(width=12)
    kinds = [type(parameter) for parameter in model.parameters()]
    with pytest.raises(PlanError, match=r"ups.0.weight is float32\[16, 12\], not"):
        engine_of(model, path)
    assert [type(parameter) for parameter in model.parameters()] == kinds


def test_a_plan_for_another_step_says_what_it_was_made_for(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    engine = engine_of(Blocks(), path, max_grad_norm=1.0)
    with pytest.raises(PlanError, match=r"do not fit this model\n.*made for h100; .*adamw"):
        engine.step(batch(0))


@pytest.mark.parametrize(
    ("placement", "message"),
    [("S(7)", "there is no dimension 7"), ("RR", "1 placements|2 placements")],
)
def test_placements_that_cannot_be_are_refused(tmp_path, placement, message):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"S(0) S(0) -> S(0)"', f'"{placement} R -> R"'))
    with pytest.raises(PlanError, match=message):
        engine_of(Blocks(), path).step(batch(0))


def test_a_plan_that_needs_the_whole_model_names_the_first_value_it_places(tmp_path):
    path = make_plan(tmp_path / "p.json", "tp=1", "tp")
    model = Blocks(breaks=True)
    with pytest.raises(PlanError, match="needs a model that is captured whole: the first value"):
        engine_of(model, path).step(batch(0))
    with pytest.raises(PlanError, match="needs a model that is captured whole: the first value"):
        stepgraph.parallelize(
            Blocks(breaks=True), example=batch(0), plan=path, mesh="tp=1", lowering="eager"
        )
    with pytest.raises(GraphBreakError, match="print"):
        stepgraph.plan(Blocks(breaks=True), example=batch(0), mesh="tp=1", placement="tp")


def test_a_report_says_what_was_predicted(tmp_path):
    path = make_plan(tmp_path / "p.json", "dp=1", "zero3")
    report = engine_of(Blocks(), path).report()
    assert "planned for h100: step " in report


def test_a_mesh_with_other_ranks_than_of_data_needs_the_whole_model():
    model = Blocks(breaks=True)
    engine = stepgraph.Engine(model, optimizer=adamw(model), plan="ddp", mesh="dp=1,tp=1")
    with pytest.raises(PlanError, match="'ddp' on mesh dp=1,tp=1 needs a model that is captured"):
        engine.step(batch(0))
