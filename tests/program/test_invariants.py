"""Every invariant finds a Program that violates it, and says which one, where and after which pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial

from stepgraph import torch_internals
from stepgraph.errors import InvariantError
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import TO_HOST, WAIT_COPY
from stepgraph.program.invariants import INVARIANTS, check_invariants
from stepgraph.program.program import FORWARD, OPTIMIZER
from tests.support import adamw, compiled, mlp, regression_batch

aten = torch.ops.aten


@pytest.fixture(scope="module")
def good():
    model = mlp()
    return compiled(model, regression_batch(), adamw(model), ranks=2).programs["step"]


def first(program, wanted):
    return next(node for node in program.operations() if wanted(node))


def tanh(program):
    return first(program, lambda node: node.target is aten.tanh.default)


def gather(program):
    return first(program, is_collective)


def emit_before_output(program, target, *args, like, **meta):
    with program.graph.inserting_before(program.graph.output_node()):
        node = program.graph.call_function(target, args)
    node.meta = {**like.meta, "name": "planted", "phase": OPTIMIZER, **meta}
    return node


# Each breaks the Program in place and returns the operation that the error must name, or None.


def forget_the_role_of_an_input(program):
    program.inputs.pop()


def forget_the_role_of_a_result(program):
    program.outputs.pop()


def give_two_inputs_the_same_role(program):
    program.inputs[1] = program.inputs[0]


def give_two_results_the_same_role(program):
    program.outputs[1] = program.outputs[0]


def read_a_value_before_it_is_made(program):
    node = tanh(program)
    node.all_input_nodes[0].prepend(node)
    return node


def forget_the_module_of_an_operation(program):
    node = tanh(program)
    del node.meta["module"]
    return node


def invent_a_phase(program):
    node = tanh(program)
    node.meta["phase"] = "sideways"
    return node


def give_two_operations_one_name(program):
    node = tanh(program)
    node.meta["name"] = next(program.operations()).meta["name"]
    return node


def let_the_forward_read_the_update(program):
    node = tanh(program)
    reader = next(user for user in node.users if user.meta["phase"] == FORWARD)
    node.meta["phase"] = OPTIMIZER
    return reader


def write_into_an_input(program):
    target = program.input_node(roles.Param("first.bias"))
    return emit_before_output(program, aten.copy_.default, target, target, like=tanh(program))


def claim_another_shape(program):
    node = tanh(program)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(2, 2)
    return node


def claim_another_dtype(program):
    node = tanh(program)
    node.meta["val"] = node.meta["val"].to(torch.float64)
    return node


def multiply_shapes_that_do_not_fit(program):
    node = first(program, lambda n: n.target in (aten.mm.default, aten.addmm.default))
    node.args = (*node.args[:-1], node.args[-2])
    return node


def describe_an_input_with_another_shape(program):
    program.input_values[0] = replace(program.input_values[0], shape=(99, 99))


def describe_the_loss_with_another_dtype(program):
    index = program.outputs.index(roles.Loss())
    program.output_values[index] = replace(program.output_values[index], dtype=torch.float64)
    return program.results[index]


def replace_a_state_by_a_pending_sum(program):
    index = next(
        i
        for i, (r, v) in enumerate(zip(program.outputs, program.output_values, strict=True))
        if isinstance(r, roles.NewOptimizerState) and v.shape == ()
    )
    program.output_values[index] = replace(program.output_values[index], placements=(Partial(),))
    return program.results[index]


def await_a_collective_twice(program):
    node = gather(program)
    emit_before_output(program, torch_internals.WAIT, node, like=node, phase=node.meta["phase"])
    return node


def read_a_collective_without_waiting(program):
    node = gather(program)
    (wait,) = node.users
    wait.replace_all_uses_with(node)
    program.graph.erase_node(wait)
    return node


def never_await_a_collective(program):
    node = gather(program)
    return emit_before_output(program, node.target, *node.args, like=node, phase=OPTIMIZER)


def wait_for_what_is_not_communicated(program):
    node = tanh(program)
    return emit_before_output(program, torch_internals.WAIT, node, like=node)


def never_await_a_copy(program):
    node = tanh(program)
    return emit_before_output(program, TO_HOST, node, like=node)


def wait_for_another_copy(program):
    node = tanh(program)
    copy = emit_before_output(program, TO_HOST, node, like=node, name="copy")
    emit_before_output(program, WAIT_COPY, copy, copy, like=node)
    return copy


def wait_for_what_is_not_copied(program):
    node = tanh(program)
    return emit_before_output(program, WAIT_COPY, node, node, like=node)


def communicate_over_an_unknown_dimension(program):
    node = gather(program)
    node.args = (*node.args[:-1], "tp")
    return node


NEGATIVES = [
    ("inputs and outputs are typed", forget_the_role_of_an_input),
    ("inputs and outputs are typed", forget_the_role_of_a_result),
    ("inputs and outputs are typed", give_two_inputs_the_same_role),
    ("inputs and outputs are typed", give_two_results_the_same_role),
    ("uses follow definitions", read_a_value_before_it_is_made),
    ("metadata is complete", forget_the_module_of_an_operation),
    ("metadata is complete", invent_a_phase),
    ("metadata is complete", give_two_operations_one_name),
    ("phases are in order", let_the_forward_read_the_update),
    ("nothing is mutated", write_into_an_input),
    ("shapes agree", claim_another_shape),
    ("shapes agree", claim_another_dtype),
    ("shapes agree", multiply_shapes_that_do_not_fit),
    ("interface matches", describe_an_input_with_another_shape),
    ("interface matches", describe_the_loss_with_another_dtype),
    ("state is replaced in kind", replace_a_state_by_a_pending_sum),
    ("collectives are awaited once", await_a_collective_twice),
    ("collectives are awaited once", read_a_collective_without_waiting),
    ("collectives are awaited once", never_await_a_collective),
    ("waits complete collectives", wait_for_what_is_not_communicated),
    ("copies are awaited once", never_await_a_copy),
    ("copies are awaited once", wait_for_another_copy),
    ("copies are awaited once", wait_for_what_is_not_copied),
    ("groups exist", communicate_over_an_unknown_dimension),
]


def test_a_program_of_the_pipeline_violates_nothing(good):
    check_invariants(good)


@pytest.mark.parametrize(
    ("invariant", "violate"), NEGATIVES, ids=[violate.__name__ for _, violate in NEGATIVES]
)
def test_a_violation_is_named_with_its_operation_and_pass(good, invariant, violate):
    program = good.copy()
    node = violate(program)
    with pytest.raises(InvariantError) as caught:
        check_invariants(program, after="a_broken_pass")
    assert f"after a_broken_pass: invariant '{invariant}' is violated" in str(caught.value)
    if node is not None:
        assert caught.value.where is not None
        assert str(node.meta["name"]) in caught.value.where.splitlines()[0]
        assert "->" in caught.value.where


def test_every_invariant_has_a_negative():
    assert {invariant for invariant, _ in NEGATIVES} == set(INVARIANTS)
