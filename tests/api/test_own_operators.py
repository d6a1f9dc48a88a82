"""stepgraph.register_operator: what is told of an operator is used where a step asks."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cost.work import bytes_moved, node_flops
from stepgraph.equivalence.check import check_model
from stepgraph.errors import CaptureError, StrictError, UsageError
from tests.own_operators import (
    ELSEWHERE,
    GROUPED_SHARDING,
    NORM,
    NORM_BACKWARD,
    NORM_SHARDING,
    Experts,
    Normed,
    elsewhere,
    elsewhere_on_host,
    norm,
    norm_backward_cost,
    norm_cost,
    registered,
    registered_norm,
    rows_of,
)
from tests.sampling import sampled
from tests.support import adamw

ROWS = rows_of(4, 6, 8)


def planned(model, mesh, batch=ROWS, **options):
    settings = {"placement": "zero3", "compute_dtype": None, "memory": "none"} | options
    return stepgraph.plan(model, example=batch, mesh=mesh, **settings)


def calls(program, target):
    return [node for node in program.operations() if node.target is target]


class Calls(nn.Module):
    """A linear layer, and an operator on what it gives."""

    def __init__(self, operator):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.operator = nn.Linear(4, 4), operator

    def forward(self, x):
        return self.operator(self.linear(x)).sum()


def engine_of(model, **options):
    return stepgraph.Engine(model, optimizer=adamw(model), lowering="eager", **options)


# ------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(("mesh", "preset"), sampled([("dp=2", "zero3"), ("tp=2", "tp+sp")]))
def test_the_cost_of_a_rank_is_that_of_its_part(mesh, preset):
    """All but the first norm: the input of the model is on every rank of tp."""
    with registered_norm():
        found = []
        for each in (mesh, mesh.replace("2", "1")):
            program = planned(Normed(), each, placement=preset).programs(Normed(), example=ROWS)[
                "step"
            ]
            for target in (NORM, NORM_BACKWARD):
                node = calls(program, target)[1 if target is NORM else 0]
                found.append((node_flops(node), bytes_moved(node)))
    x = torch.empty(4, 6, 8)
    whole = [norm_cost(x, None), norm_backward_cost(None, x, None, None)]
    assert found[2:] == whole
    assert found[:2] == [(flops / 2, moved / 2) for flops, moved in whole]


def test_a_prediction_counts_what_is_told():
    with registered_norm():
        cheap = planned(Normed(), "dp=2").predicted
    dear = {"sharding": NORM_SHARDING, "cost": lambda x, weight: (1e15, x.nbytes)}
    with registered_norm(), registered(norm=dear):
        assert planned(Normed(), "dp=2").predicted.compute_ms > cheap.compute_ms + 1e3


def test_a_cost_that_is_no_pair_of_numbers_is_an_error():
    wrong = {"cost": lambda x, weight: x.numel()}
    with registered(norm=wrong), pytest.raises(UsageError, match="norm.default: its cost is 192"):
        planned(Normed(), "dp=1")


def test_a_name_with_attention_in_it_says_nothing():
    @torch.library.custom_op("tested::attention_like", mutates_args=())
    def attention_like(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    attention_like.register_fake(torch.empty_like)
    attention_like.register_autograd(lambda ctx, gradient: gradient * 2)
    example = (torch.ones(4, 4),)
    assert planned(Calls(attention_like), "dp=1", example).predicted.step_ms > 0


def test_the_solver_uses_what_is_told():
    with registered_norm(), registered(grouped={"sharding": GROUPED_SHARDING}):
        assert not any("sharding rule" in n for n in planned_notes(Normed(), ROWS))
        assert not any("sharding rule" in n for n in planned_notes(Experts(), rows_of(4, 8)))


@pytest.mark.slow
def test_the_solver_says_what_nobody_registered():
    notes = planned_notes(Normed(), ROWS)
    assert any("register_operator(tested.norm_backward.default" in note for note in notes)


def planned_notes(model, batch):
    plan = planned(model, "dp=2,tp=2", batch, placement="auto")
    return plan.programs(model, example=batch)["step"].notes


# ------------------------------------------------------------------------------------- the stand-in


@pytest.mark.slow
def test_a_step_is_checked():
    model = Normed()
    with registered_norm():
        report = stepgraph.check(engine_of(model), ROWS)
    assert report.ok, str(report)


@torch.library.custom_op("tested::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda ctx, gradient: centred(gradient))


@pytest.mark.parametrize(
    ("text", "holds"), [("_ width -> _ width", True), ("rows _ -> rows _", False)]
)
def test_a_way_that_is_wrong_is_found_where_it_is_taken(text, holds):
    """What an author says of rows is not so: a step on two ranks is another."""
    stepgraph.register_operator(centred, sharding=text)
    model = Calls(lambda y: centred(y.sin()).square())
    batch = (torch.randn(4, 4),)
    report = check_model(model, batch=batch, optimizer=adamw(model), mesh="dp=2", plan="zero3")
    assert report.ok == holds, str(report)
    assert holds or "place_values" in str(report.first_difference)


def test_a_kernel_that_is_not_here_has_a_stand_in():
    """Captured on the host, planned for a device that is not there, run by the stand-in."""
    model, x = Calls(lambda y: elsewhere(y, 2.0)), torch.randn(4, 4)
    with registered(
        elsewhere={"host": elsewhere_on_host, "sharding": "rows (width) -> rows (width)"}
    ):
        program = planned(model, "dp=2", (x,)).programs(model, example=(x,))["step"]
        (node,) = calls(program, ELSEWHERE)
        assert node.meta["val"].device.type == "cuda" and node.meta["val"].shape == (2, 4)
        expected = (model.linear(x).sin() * 2).sum()
        expected.backward()
        gradient = model.linear.weight.grad.clone()
        engine = stepgraph.Engine(model, lowering="eager", strict=True)
        torch.testing.assert_close(engine.step((x,)), expected.detach())
        torch.testing.assert_close(model.linear.weight.grad.to_local(), gradient)
        assert stepgraph.check(engine_of(Calls(lambda y: elsewhere(y, 2.0))), (x,)).ok
        with registered(elsewhere={"host": lambda x, by: x * by}):  # the later is the stand-in
            torch.testing.assert_close(elsewhere(x, 3.0), x * 3)
    with registered(elsewhere={"host": elsewhere_on_host}):
        torch.testing.assert_close(elsewhere(x, 3.0), x.sin() * 3)


def test_a_kernel_of_the_host_stays():
    @torch.library.custom_op("tested::has_one", mutates_args=(), device_types="cpu")
    def has_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    stepgraph.register_operator(has_one, host=lambda x: x + 2)
    assert has_one(torch.zeros(())) == 1


def test_an_operator_of_a_library_gets_kernel_and_shapes():
    library = torch.library.Library("tested_library", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    packet = torch.ops.tested_library.twice
    stepgraph.register_operator(packet, host=lambda x: x * 2)
    assert packet(torch.ones(())) == 2
    with stepgraph.torch_internals.new_fake_mode():
        assert packet(torch.ones(2, 3)).shape == (2, 3)


def test_an_operator_of_triton_stays_one_operator():
    @torch.library.triton_op("tested::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    tripled.register_autograd(lambda ctx, gradient: gradient * 3)
    stepgraph.register_operator(tripled, sharding="rows _ -> rows _", host=lambda x: x * 3)
    model, x = Calls(tripled), torch.randn(4, 4)
    program = planned(model, "dp=2", (x,)).programs(model, example=(x,))["step"]
    assert len(calls(program, torch.ops.tested.tripled.default)) == 1
    expected = model.linear(x).sum().detach() * 3
    torch.testing.assert_close(engine_of(model).step((x,)), expected)


# -------------------------------------------------------------------------------- nothing is told


def test_what_nobody_registered_runs_and_the_report_says_how():
    model = Normed()
    engine = engine_of(model)
    torch.testing.assert_close(engine.step(ROWS), Normed(fused=False)(*ROWS).detach())
    assert "stepgraph.register_operator(tested.norm.default, sharding=...)" in str(engine.report())


def test_strictly_it_must_be_registered():
    model = Normed()
    with pytest.raises(StrictError, match="register_operator"):
        engine_of(model, strict=True).step(ROWS)


@torch.library.custom_op("tested::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("tested::formless", mutates_args=())
def formless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_without_a_fake_implementation_it_cannot_be_captured():
    library = torch.library.Library("tested_shapeless", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    for operator in (shapeless, torch.ops.tested_shapeless.twice):
        with pytest.raises(CaptureError, match=r"no fake implementation") as raised:
            engine_of(Calls(operator)).step((torch.randn(4, 4),))
        name = str(getattr(operator, "_opoverload", operator)).removesuffix(".default")
        assert name in str(raised.value) and "stepgraph.register_operator(" in str(raised.value)


def test_a_stand_in_is_no_formula_for_gradients():
    library = torch.library.Library("tested_formless", "DEF")
    library.define("twice(Tensor x) -> Tensor")  # torch would warn, and give no gradient
    for operator in (formless, torch.ops.tested_formless.twice):
        stepgraph.register_operator(operator, host=lambda x: x * 2)
        with pytest.raises(CaptureError, match="tested.* has no autograd formula") as raised:
            engine_of(Calls(operator)).step((torch.randn(4, 4),))
        assert "torch.library.register_autograd" in str(raised.value)


# ------------------------------------------------------------------------------------ what is wrong


class Kernel:
    """As Triton's jitted functions are."""

    __module__ = "triton.runtime.jit"


@pytest.mark.parametrize(
    ("operator", "problem"),
    [
        (torch.ops.aten.mm.default, "known already"),
        (torch.ops.aten.mm, "not one operator"),
        (torch.relu, "not one operator"),
        ("tested::norm", "not one operator"),
        (Kernel(), "torch.library.triton_op"),
    ],
)
def test_other_things_are_no_operators(operator, problem):
    with pytest.raises(UsageError, match=problem):
        stepgraph.register_operator(operator)


def test_an_operator_that_writes_is_refused():
    @torch.library.custom_op("tested::writes", mutates_args=("x",))
    def writes(x: torch.Tensor) -> None:
        x.zero_()

    with pytest.raises(UsageError, match="writes into its arguments"):
        stepgraph.register_operator(writes)


@pytest.mark.parametrize("saved", ["wieght", 2, -1])
def test_what_it_saves_are_arguments(saved):
    with pytest.raises(UsageError, match="no argument"):
        stepgraph.register_operator(norm, saves=[saved])


def test_a_text_for_other_dimensions_is_an_error_of_the_step():
    flat = {"sharding": "rows _, _ -> rows _, rows"}
    with registered(norm=flat), pytest.raises(UsageError, match="no registered sharding") as raised:
        engine_of(Normed()).step(ROWS)
    assert "layers.0.norm/norm" in str(raised.value)
