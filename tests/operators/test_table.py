"""Every operator has a record; what nobody knows is treated with care."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.operators.table import CONSTANT, LOOP, ROWS, Operator
from stepgraph.operators.views import NAMES_A_SHAPE, PARTS_OF_A_RESULT, REARRANGES
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@torch.library.custom_op("stepgraph_tests::nobody_knows", mutates_args=())
def nobody_knows(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_every_record_is_of_an_operator_of_this_torch_or_of_one_said_to_be_absent():
    for target in operators.KNOWN:
        assert isinstance(target, (torch._ops.OpOverload, private.Absent)), target


def test_on_the_torch_that_was_tried_nothing_is_absent():
    if private.SEEN.get(torch.__version__.split("+")[0]) != "tried":
        pytest.skip("another torch")
    assert not [name for name, value in vars(private).items() if isinstance(value, private.Absent)]


def test_an_absent_operator_has_a_record_that_no_node_asks_for():
    absent = private._find("_no_such_operator.default")
    assert absent == private.Absent("_no_such_operator.default")
    assert not absent.overloads()
    assert operators.of(absent) == Operator(absent)


def test_an_unknown_operator_is_a_kernel_of_its_own_and_no_view():
    target = torch.ops.stepgraph_tests.nobody_knows.default
    assert operators.of(target) == Operator(target, aliased=())


def test_what_is_no_operator_has_a_record_too():
    assert operators.of(operator.getitem) == Operator(operator.getitem)


def test_declarations_are_added_to_what_schema_and_tags_say():
    assert operators.of(aten.exp.default).fusing == LOOP
    assert operators.of(aten.exp.default).cost == "exp"
    assert operators.of(aten.sum.default).reduces
    assert operators.of(aten.native_layer_norm.default).fusing == ROWS
    assert operators.of(aten.zeros_like.default).fusing == CONSTANT
    assert operators.of(aten.bernoulli.default).draws
    assert operators.of(private.TO_COPY).copies


def test_what_rearranges_a_value_may_share_its_storage():
    for target in (REARRANGES | PARTS_OF_A_RESULT) - {torch_internals.UNSAFE_VIEW}:
        assert operators.of(target).aliased == (0,), target
    assert NAMES_A_SHAPE < REARRANGES


def test_nothing_in_a_record_can_be_assigned_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        operators.of(aten.exp.default).cost = ""  # type: ignore[misc]
