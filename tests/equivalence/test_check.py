"""check: a sound step passes; a planted bug is found at the pass that made it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from stepgraph import torch_internals
from stepgraph.capture.passes.clip_gradients import clip_gradients
from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.finish_accumulation import finish_accumulation
from stepgraph.capture.passes.update_parameters import update_parameters
from stepgraph.equivalence.check import ENTRIES, check_model
from stepgraph.equivalence.comparing import (
    NOT_COMPARED,
    CheckReport,
    compare,
    relative_difference,
    rounding_alone,
    tolerance,
)
from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.pipeline import ROADS
from stepgraph.placement.passes.place_values import place_values
from stepgraph.planning.decisions import OperationPlacement
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.program import BACKWARD, OPTIMIZER
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from tests.sampling import sampled
from tests.support import adamw, mlp, regression_batch, tiny_llama, token_batch

aten = torch.ops.aten


def check(reduction="count", replaced=None, scaled=False, **options):
    model = mlp(reduction, scaled=scaled)
    settings = {"mesh": "dp=2", "plan": "ddp", "optimizer": adamw(model)} | options
    return check_model(model, batch=regression_batch(), replaced=replaced, **settings)


def first(program, target, phase=None):
    return next(node for node in program.operations(phase) if node.target is target)


# ------------------------------------------------------------------------------------ sound steps


@pytest.mark.parametrize(
    ("plan", "ranks"),
    sampled([(p, n) for p in ("ddp", "zero1", "zero2", "zero3") for n in (1, 2, 3, 4)], every=5),
)
def test_a_sound_step_passes_on_every_mesh(plan, ranks):
    report = check("mean", mesh=f"dp={ranks}", plan=plan, memory="full", max_grad_norm=0.5)
    assert report.ok, str(report)
    assert report.first_difference is None
    assert str(report).endswith("all passes agree")


def test_a_plan_that_is_to_be_found_is_found_for_the_machine_at_hand():
    report = check("mean", plan="auto")
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("plan", "reduction"),
    sampled(
        [(p, r) for p in ("ddp", "zero1", "zero2", "zero3") for r in ("count", "sum")], every=5
    ),
)
def test_micro_batches_pass(plan, reduction):
    report = check(reduction, mesh="dp=3", plan=plan, micro_batches=2, max_grad_norm=0.5)
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_transformer_with_ignored_labels_and_a_padding_mask_passes():
    model = tiny_llama()
    report = check_model(
        model,
        optimizer=adamw(model),
        batch=token_batch(),
        mesh="dp=3",
        memory="full",
        micro_batches=2,
        max_grad_norm=0.5,
        lowerings=("eager",),
    )
    assert report.ok, str(report)
    assert not any(check.preserves == NOT_COMPARED for check in report.passes)
    on_the_road = {
        step.name for name, road in ROADS.items() if "graph by graph" not in name for step in road
    }
    assert {check.name for check in report.passes} == {"capture", "lowered by eager"} | on_the_road
    assert {check.program for check in report.passes} == {"accumulate", *ENTRIES}


@pytest.mark.parametrize("plan", sampled(["ddp", "zero1", "zero3", "zero2"]))
def test_micro_batches_of_a_mean_loss_pass_on_several_ranks(plan):
    report = check("mean", plan=plan, micro_batches=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_a_parameter_of_no_dimension_passes(plan):
    report = check(scaled=True, plan=plan, micro_batches=2)
    assert report.ok, str(report)


def test_a_parameter_of_no_dimension_is_clipped():
    report = check(scaled=True, max_grad_norm=0.5)
    assert report.ok, str(report)


def test_the_model_and_its_optimizer_stay_as_they_were():
    model = mlp()
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model(model, optimizer=optimizer, batch=regression_batch(), mesh="dp=2")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


# ----------------------------------------------------------------------------------- planted bugs


def test_a_dropped_reduction_is_found_at_place_values():
    def broken(program, **given):
        program = place_values(program, **given)
        reduction = first(program, torch_internals.ALL_REDUCE, BACKWARD)  # of a gradient
        (wait,) = reduction.users
        wait.replace_all_uses_with(reduction.args[0])
        return program.finish()

    assert check(replaced={"place_values": broken}).first_difference == "place_values"


def test_a_swapped_operand_is_found_at_drop_identities():
    def broken(program):
        difference = first(program, aten.sub.Tensor)
        difference.args = difference.args[::-1]
        return drop_identities(program)

    assert check(replaced={"drop_identities": broken}).first_difference == "drop_identities"


def _scale_a_gradient(program, factor=2.0):
    emit = Builder(program, OPTIMIZER)
    role = next(role for role in program.outputs if isinstance(role, roles.Grad))
    results = list(program.results)
    index = program.outputs.index(role)
    results[index] = emit(aten.mul.Tensor, results[index], factor)
    results[index].meta["name"] = "planted"
    program.graph.output_node().args = (tuple(results),)
    return program.finish()


@pytest.mark.parametrize(
    ("sound", "options"),
    [(finish_accumulation, {"micro_batches": 2}), (clip_gradients, {"max_grad_norm": 0.5})],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_gradient_scaled_twice_is_found_at_the_pass_that_scales(sound, options):
    def broken(program, **given):
        return _scale_a_gradient(sound(program, **given))

    report = check(replaced={sound.name: broken}, **options)
    assert report.first_difference == sound.name


class _Rows(nn.Module):
    """As many columns as rows, so that a cut along the wrong one fits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (torch.softmax(self.linear(x), 1) * x).sum()


def test_a_wrong_shard_dimension_is_found_at_place_values():
    def broken(program, decision, mesh):
        softmax = first(program, aten._softmax.default)
        columns = ((Shard(1),),)
        wrong = {softmax.meta["name"]: OperationPlacement(columns, columns)}
        decision = replace(decision, operations={**decision.operations, **wrong})
        return place_values(program, decision, mesh)

    torch.manual_seed(0)
    report = check_model(
        _Rows(), batch=torch.randn(4, 4), mesh="dp=2", replaced={"place_values": broken}
    )
    assert report.first_difference == "place_values"


def test_a_stale_learning_rate_is_found_at_update_parameters():
    def broken(program, **given):
        program = update_parameters(program, **given)
        rate = program.input_node(roles.Scalar("group0.lr"))
        emit = Builder(program, OPTIMIZER, next(iter(rate.users)))
        stale = emit(aten.full.default, [], 0.02, dtype=torch.float64)
        stale.meta["name"] = "planted"
        rate.replace_all_uses_with(stale)
        return program.finish()

    assert check(replaced={"update_parameters": broken}).first_difference == "update_parameters"


def _without_a_wait(program):
    collective = first(program, torch_internals.ALL_REDUCE)
    (wait,) = collective.users
    wait.replace_all_uses_with(collective)
    return program.finish()


def test_a_missing_wait_is_found_at_place_values():
    def broken(program, **given):
        return _without_a_wait(place_values(program, **given))

    report = check(replaced={"place_values": broken})
    assert report.first_difference == "place_values"
    assert "collectives are awaited once" in str(report)


@pytest.mark.parametrize(
    "sound",
    [merge_small_collectives, update_early, delay_waits, bind_to_rank],
    ids=lambda sound: sound.name,
)
def test_a_missing_wait_is_found_at_the_pass_that_lost_it(sound):
    def broken(program, **given):
        return _without_a_wait(sound(program, **given))

    report = check(replaced={sound.name: broken})
    assert report.first_difference == sound.name


def test_a_recomputation_of_something_else_is_found_at_recompute_in_backward():
    def broken(program, decision):
        program = recompute_in_backward(program, decision)
        copy = next(node for node in program.operations() if "recomputed_from" in node.meta)
        copy.target = aten.sigmoid.default if copy.target is aten.tanh.default else copy.target
        for node in program.operations(BACKWARD):
            if "recomputed_from" in node.meta and node.target is aten.tanh.default:
                node.target = aten.sigmoid.default
        return program.finish()

    report = check(memory="full", replaced={"recompute_in_backward": broken})
    assert report.first_difference == "recompute_in_backward"


def test_another_ranks_part_is_found_at_bind_to_rank():
    def broken(program, rank):
        return bind_to_rank(program, 0)

    report = check(plan="zero1", mesh="dp=2", replaced={"bind_to_rank": broken})
    assert report.first_difference == "bind_to_rank"


def test_interchanged_parts_are_found_at_merge_small_collectives():
    def broken(program, decision):
        program = merge_small_collectives(program, decision)
        same: dict = {}
        for node in program.operations():
            if node.target is not aten.slice.Tensor:
                continue
            key = (node.args[0], tuple(node.meta["val"].shape))
            if key in same:
                node.args, same[key].args = same[key].args, node.args
                return program.finish()
            same[key] = node
        raise AssertionError("no two parts of a flat collective have the same size")

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    report = check_model(
        model,
        loss=lambda model, x: model(x).square().sum(),
        batch=torch.randn(4, 4),
        mesh="dp=2",
        plan="ddp",
        replaced={"merge_small_collectives": broken},
    )
    assert report.first_difference == "merge_small_collectives"


def test_a_state_written_too_early_is_found_at_write_state_in_place():
    def broken(program):
        program = write_state_in_place(program)
        for node in list(program.operations()):
            if node.target is torch_internals.mutable_copy:
                readers = [
                    reader
                    for reader in node.args[0].users
                    if reader.op == "call_function" and reader < node and reader > node.args[1]
                ]
                if readers:
                    min(readers).prepend(node)
                    return program.finish()
        raise AssertionError("nothing reads an old value after the new one is made")

    report = check(replaced={"write_state_in_place": broken})
    assert report.first_difference == "write_state_in_place"


@pytest.mark.parametrize("name", ["fuse_updates", "compute_pieces_in_place"])
def test_what_undoes_itself_the_second_time_is_found_the_first(name):
    """Passes that ask whether a lowering fuses are applied for both answers."""
    other = {aten.tanh.default: aten.sin.default, aten.sin.default: aten.tanh.default}

    def broken(program, fuses):
        for node in program.operations():
            node.target = other.get(node.target, node.target)
        return program

    report = check(replaced={name: broken})
    assert report.first_difference == name


def test_a_pass_that_preserves_bits_is_held_to_them():
    def broken(program):
        return _scale_a_gradient(drop_identities(program), 1 + 1e-6)

    report = check(replaced={"drop_identities": broken})
    assert report.first_difference == "drop_identities"


# ---------------------------------------------------------------------------------- its yardstick


def test_two_results_differ_relative_to_the_largest_entry():
    a = torch.tensor([4.0, 1.0])
    assert relative_difference(a, a + torch.tensor([0.0, 1.0])) == 0.25
    assert relative_difference(a, a[:1]) == float("inf")
    assert relative_difference(torch.tensor([1]), torch.tensor([2])) == float("inf")
    nan = torch.tensor([float("nan"), 1.0])
    assert relative_difference(nan, nan.clone()) == 0.0
    assert relative_difference(nan, torch.ones(2)) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(torch.zeros(2), torch.ones(2)) == float("inf")


def test_a_gradient_that_is_rounding_alone_is_not_compared_and_named():
    """A key's bias in an attention changes nothing: its gradient is a sum of what cancels."""

    def compared(old_bias, new_bias, new_weight=1.0, preserves="summation order", report=None):
        old = {roles.Grad("weight"): torch.ones(2), roles.Grad("bias"): torch.tensor([old_bias])}
        new = {
            roles.Grad("weight"): torch.full((2,), new_weight),
            roles.Grad("bias"): torch.tensor([new_bias]),
            roles.NewParam("bias"): torch.tensor([new_bias]),
        }
        old[roles.NewParam("bias")] = torch.tensor([old_bias])
        report = report or CheckReport()
        compare(report, "step", "a pass", preserves, old, new)
        return report

    report = compared(1e-9, -3e-9)
    assert report.ok and "rounding alone: bias" in str(report)
    assert compared(0.0, 1e-9).ok
    assert not compared(1e-9, -3e-9, preserves="bitwise").ok
    assert not compared(1e-9, 1e-3).ok
    assert not compared(1e-3, 1e-9).ok
    assert not compared(1e-5, -3e-5).ok
    assert not compared(1e-9, -3e-9, new_weight=1.1).ok
    assert not compared(1e-9, float("nan")).ok
    assert not compared(5.0, -3.0, new_weight=float("inf")).ok
    assert "rounding" not in str(compared(1e-3, 1e-3))
    assert not compared(1e-9, 1.0, report=report).ok, "another pass has to show it anew"


def test_rounding_is_that_of_fp32_where_gradients_are_rounded_further():
    small = {roles.Grad("large"): torch.ones(2), roles.Grad("small"): torch.tensor([1e-4])}
    small = {role: value.bfloat16() for role, value in small.items()}
    assert rounding_alone(small, small) == set()
    assert rounding_alone({roles.Grad("large"): torch.ones(2, dtype=torch.int64)}, small) == set()
    assert rounding_alone({roles.Grad("large"): torch.ones(0)}, small) == set()


def test_infinities_of_the_same_sign_are_equal_and_others_are_not():
    big = torch.tensor([float("inf"), 1.0])
    assert relative_difference(big, big.clone()) == 0.0
    assert relative_difference(big, -big) > 0
    assert relative_difference(big, torch.ones(2)) > 0


def test_two_byte_results_may_differ_by_their_own_precision():
    assert tolerance([torch.ones(1)]) < 1e-4 < tolerance([torch.ones(1, dtype=torch.bfloat16)])
    assert tolerance([torch.ones(1, dtype=torch.int64)]) == 0.0
