"""stepgraph.plan: a plan and its prediction, without ranks, values or an accelerator."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph import pipeline
from stepgraph.api import planner
from stepgraph.api.plan import mesh_shape, parse_size
from stepgraph.capture.module import default_loss
from stepgraph.cost.devices import find_device
from stepgraph.cost.predict import predict
from stepgraph.cost.traffic import assign_traffic
from stepgraph.errors import BatchError, BudgetError, MeshError, PlanError, UsageError
from stepgraph.pipeline import executed, foresee
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.planning.sizes import show_bytes_up
from stepgraph.program.driver import PassDriver
from stepgraph.torch_internals import new_fake_mode
from tests.sampling import sampled
from tests.support import adamw, mlp, regression_batch, tiny_llama


def plan_mlp(**options):
    settings = {"mesh": "dp=2", "placement": "zero3", "example": regression_batch()}
    return stepgraph.plan(mlp(), **(settings | options))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks that repeat, and a loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def stack_on():
    """Plans of four blocks; they are captured once."""
    model = Stack()
    made = planner.Planner(
        model,
        (torch.empty(256, 16),),
        default_loss,
        adamw(model),
        find_device("h100"),
        StepSettings("adamw", precision=Precision(torch.bfloat16)),
    )
    return lambda mesh, placement, *asked: made.plan(mesh_shape(mesh), placement, *asked)


@pytest.fixture(scope="module")
def stack(stack_on):
    """Those of zero3."""
    return lambda *asked: stack_on("dp=2", "zero3", *asked)


@pytest.fixture(scope="module")
def peaks(stack):
    """Predicted peaks by memory policy."""
    return {memory: stack(memory).peak for memory in ("none", "layers:2", "full")}


def test_nothing_is_needed_and_nothing_is_left_behind():
    with torch.device("meta"):
        model = tiny_llama(1)
    with new_fake_mode():
        example = {n: torch.empty(12, 8, dtype=torch.int64) for n in ("input_ids", "labels")}
    kinds = {name: type(parameter) for name, parameter in model.named_parameters()}
    plan = stepgraph.plan(model, example=example, mesh="dp=4", placement="zero3")
    assert plan.predicted.step_ms > 0 and plan.request.device == "h100"
    assert not dist.is_initialized() and not torch.cuda.is_initialized()
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == kinds
    assert all(parameter.is_meta for parameter in model.parameters())
    assert plan.request.batch == {"input_ids": "int64[12, 8]", "labels": "int64[12, 8]"}


@pytest.mark.slow
def test_a_model_may_be_a_name():
    ids = torch.empty(4, 16, dtype=torch.int64, device="meta")
    plan = stepgraph.plan(
        "llama-tiny", example={"input_ids": ids, "labels": ids}, mesh="dp=2", placement="zero3"
    )
    assert "model.layers.3.mlp.up_proj.weight" in plan.fingerprint.parameters
    programs = plan.programs("llama-tiny", example={"input_ids": ids, "labels": ids})
    assert [*programs] == ["step"]
    with pytest.raises(PlanError, match="another model"):
        plan.programs("gpt2", example={"input_ids": ids, "labels": ids})


def test_a_prediction_is_that_of_the_programs_that_run(monkeypatch):
    seen = []
    monkeypatch.setattr(
        pipeline, "predict", lambda *given: (seen.append(given), predict(*given))[1]
    )
    plan = plan_mlp(memory="none", device="a100", micro_batches=2, max_grad_norm=1.0)
    programs, device, micro_batches = seen[0]
    assert set(programs) == {"accumulate", "step"} == set(plan.decisions)
    assert (device, micro_batches) == (find_device("a100"), 2)
    assert plan.predicted == predict(programs, device, 2)
    assert (plan.request.step.micro_batches, plan.request.step.clip) == (2, True)
    model = mlp()
    run = plan.programs(model, example=regression_batch(), optimizer=adamw(model))
    lowering = plan.request.lowering
    assert {n: str(executed(p, lowering, {}, PassDriver())) for n, p in run.items()} == {
        name: str(program) for name, program in programs.items()
    }
    with pytest.raises(PlanError, match="another model"):
        plan.programs(mlp(scaled=False), example=regression_batch())


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_traffic_is_that_of_what_is_executed(monkeypatch, lowering):
    model, seen = mlp(), []
    run = plan_mlp().programs(model, example=regression_batch(), optimizer=adamw(model))
    monkeypatch.setattr(
        "stepgraph.lowering.costed.assign_traffic",
        lambda p, fused: (seen.append((p, fused)), assign_traffic(p, fused)),
    )
    foresee(run, find_device("h100"), lowering)
    ((program, fused),) = seen
    assert fused is (lowering == "inductor")
    assert str(program) == str(executed(run["step"], lowering, {}, PassDriver()))


def test_a_step_is_captured_once_however_many_plans_are_made(stack, monkeypatch):
    stack("full")
    monkeypatch.setattr(planner, "capture_of", None)
    assert stack("full").plan == stack("full").plan


@pytest.mark.parametrize(
    ("how", "memory"),
    sampled(
        [(how, m) for how in ("auto", "budget") for m in ("layers:2", "none", "full")], every=3
    ),
)
def test_a_budget_is_kept_to_and_no_named_policy_that_fits_is_faster(stack, peaks, memory, how):
    assert peaks["none"] > peaks["layers:2"] > peaks["full"]
    named, budget = stack(memory), peaks[memory]
    found = stack("auto", budget) if how == "auto" else stack(f"budget:{budget}B")
    assert found.fits and found.plan.request.memory_budget == budget
    assert found.plan.predicted.peak_bytes == found.peak <= budget
    assert found.plan.predicted.step_ms <= named.plan.predicted.step_ms * (1 + 1e-9)
    assert any(note.startswith(f"memory {found.plan.memory}: ") for note in found.plan.notes)
    run = foresee(found.made.programs, find_device("h100"), found.plan.lowering)
    assert found.plan.predicted == run, "it is that of what was tried, which is what runs"


def test_a_plan_within_a_budget_is_replayed(stack, peaks, monkeypatch):
    found = stack("auto", peaks["layers:2"]).plan
    (decided,) = found.decisions.values()
    assert decided.memory.policy == "auto" and decided.memory.recompute
    monkeypatch.setattr(pipeline, "simulation", None)  # nothing is searched for again
    read = stepgraph.Plan.from_json(stepgraph.api.plan.public(found).to_json())
    model = Stack()
    again = read.programs(model, example=(torch.empty(256, 16),), optimizer=adamw(model))
    recomputed = {node.meta.get("recomputed_from") for node in again["step"].operations()} - {None}
    assert recomputed and recomputed <= decided.memory.recompute.keys()


@pytest.mark.slow
def test_a_budget_that_nothing_fits_says_the_smallest_that_does(stack, peaks):
    with pytest.raises(BudgetError) as error:
        stack("auto", 4096)
    message, smallest = str(error.value), error.value.smallest
    assert message.startswith("no plan fits 4 KiB a rank")
    assert f"the smallest peak is {show_bytes_up(smallest)}" in message
    assert smallest <= peaks["full"]
    assert "program 'step'" in message and " take " in message
    assert stack("auto", smallest).peak == smallest
    with pytest.raises(BudgetError, match="no plan fits 1 KiB"):
        plan_mlp(memory_budget=1024)
    with pytest.raises(BudgetError, match="memory none"):
        plan_mlp(memory="none", memory_budget="1KiB")


@pytest.mark.slow
def test_a_search_for_placements_keeps_to_a_budget_too(stack_on, peaks):
    none = stack_on("dp=2", "auto", "none")
    full = stack_on("dp=2", "auto", "full")
    budget = (none.peak + full.peak) // 2
    found = stack_on("dp=2", "auto", f"budget:{budget}B")
    assert found.fits and found.peak <= budget
    assert any("placements are those found under" in note for note in found.plan.notes)
    assert stack_on("dp=2", "auto", "auto", none.peak).fits


class Deep(nn.Module):
    """Narrow layers on many rows: activations are most of what a step holds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_what_waits_on_the_host_takes_no_memory_of_a_rank():
    model, batch = Deep(), (torch.empty(4096, 8),)
    asked = default_loss, adamw(model), find_device("h100"), StepSettings("adamw")
    made = planner.Planner(model, batch, *asked)
    attempt = made.plan(mesh_shape("dp=2"), "zero3", "*=offload", 1000)
    sizes = attempt.plan.predicted.bytes_by_category
    assert max(sizes, key=sizes.get) == "on the host" and not attempt.fits
    assert "smallest peak is" in str(attempt.error()) and "host" not in str(attempt.error())


def test_a_frontier_goes_from_least_memory_to_least_time(stack, peaks, tmp_path):
    plan = plan_mlp(memory="none", frontier=True)
    points = plan.frontier()
    assert points and all(point.keeps for point in points)
    for one, other in itertools.pairwise(points):
        assert one.peak_bytes < other.peak_bytes and one.step_ms > other.step_ms
    assert points[-1].step_ms <= plan.predicted.step_ms
    plan.save(tmp_path / "plan.json")
    assert stepgraph.Plan.load(tmp_path / "plan.json").frontier() == points
    within = plan_mlp(memory=f"budget:{points[0].peak_bytes}B", frontier=True)
    assert within.frontier() == points and within.predicted.peak_bytes <= points[0].peak_bytes


def test_within_a_budget_both_programs_of_micro_batches_are_predicted():
    plan = plan_mlp(memory="budget:1GiB", micro_batches=2)
    model = mlp()
    run = plan.programs(model, example=regression_batch(), optimizer=adamw(model))
    assert set(run) == {"accumulate", "step"}
    assert plan.predicted == foresee(run, plan.request.costs(), plan.lowering, 2)


@pytest.mark.slow
def test_micro_batches_have_one_frontier():
    points = plan_mlp(memory="full", micro_batches=2, frontier=True).frontier()
    assert points[-1].step_ms > plan_mlp(memory="none", frontier=True).frontier()[-1].step_ms


def test_a_plan_without_a_frontier_says_so():
    with pytest.raises(PlanError, match="holds no memory-time frontier(.|\n)*frontier=True"):
        plan_mlp().frontier()


def test_a_memory_that_was_asked_for_is_planned_though_the_device_is_too_small(monkeypatch):
    small = planner.replace(find_device("h100"), capacity=1000)
    monkeypatch.setattr("stepgraph.api.plan.find_device", lambda name: small)
    assert any("it does not fit: the peak is" in note for note in plan_mlp(memory="none").notes)
    with pytest.raises(BudgetError):
        plan_mlp()


def test_a_model_without_blocks_is_searched_as_one():
    plan = plan_mlp(memory="none")
    budget = plan.predicted.peak_bytes - 1
    try:
        found = plan_mlp(memory_budget=budget)
    except BudgetError as error:
        assert "smallest peak" in str(error)
    else:
        assert found.predicted.peak_bytes <= budget


@pytest.mark.parametrize(
    "mesh",
    ["dp=16,tp=8", (("dp", 16), ("tp", 8)), ((16, 8), ("dp", "tp")), [["dp", 16], ["tp", 8]]],
)
def test_meshes_are_written_in_several_ways(mesh):
    assert str(mesh_shape(mesh)) == "dp=16,tp=8"


@pytest.mark.parametrize("mesh", ["dp=2,cp=2", (("dp", 2), ("cp", 2)), ((2, 2), ("dp", "cp"))])
def test_a_mesh_dimension_without_a_role_is_an_error(mesh):
    with pytest.raises(MeshError, match="role of a mesh dimension 'cp'"):
        mesh_shape(mesh)


@pytest.mark.parametrize("mesh", [(), 8, (16, 8), (("dp", 0),), (("dp", "x"),), "dp", None])
def test_what_is_no_mesh(mesh):
    with pytest.raises(MeshError):
        mesh_shape(mesh)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("70GiB", 70 * 2**30), ("1.5 MiB", 1.5 * 2**20), (123, 123), ("5GB", 5e9), (None, None)],
)
def test_budgets_are_written_in_several_ways(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["much", "-1GiB", 0, -5, "5 parsecs", 1.5, True, "GiB"])
def test_what_is_no_budget(size):
    with pytest.raises(UsageError, match="memory budget"):
        parse_size(size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "h1000"}, UsageError, "h100"),
        ({"optimizer": "adamww"}, UsageError, "did you mean 'adamw'"),
        ({"placement": "zero4"}, UsageError, "did you mean 'zero3'"),
        ({"placement": "tp+zero3"}, MeshError, "the mesh dp=2 lacks tp"),
        ({"memory": "some"}, UsageError, "unknown memory policy"),
        ({"memory": "layers:2"}, UsageError, "no block of this model repeats"),
        ({"mesh": "dp=5"}, BatchError, "12 rows .* do not divide over 5 data-parallel ranks"),
        ({"micro_batches": 5}, BatchError, "12 rows, which do not divide into 5"),
        ({"example": 3}, BatchError, "must hold tensors"),
        ({"compute_dtype": torch.int8}, UsageError, "compute_dtype"),
        ({"constraints": {"*": "R"}}, UsageError, "constraints are for placement='auto'"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        plan_mlp(**options)


def test_an_unknown_model_has_near_misses():
    with pytest.raises(UsageError, match="did you mean 'llama3-8b'"):
        stepgraph.plan("llama3-8", example={}, mesh="dp=2", placement="zero3")
    with pytest.raises(UsageError, match="must be an nn.Module"):
        stepgraph.plan(7, example={}, mesh="dp=2", placement="zero3")


def test_gradients_alone_and_ones_own_optimizer():
    plan = plan_mlp(optimizer=None)
    assert plan.predicted.bytes_by_category["optimizer"] == 0
    model = mlp()
    own = stepgraph.plan(
        model, example=regression_batch(), mesh="dp=2", placement="zero3", optimizer=adamw(model)
    )
    assert own.request == plan_mlp().request
    assert own.diff(plan_mlp()) == ""
    assert not own.diff(plan_mlp(optimizer="sgd")).startswith("mesh")


def test_a_plan_is_final():
    plan = plan_mlp(mesh="dp=1")
    with pytest.raises(PlanError, match="another model"):
        stepgraph.Engine(mlp(scaled=False), mesh="dp=1", plan=plan, lowering="eager")
