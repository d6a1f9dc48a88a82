"""place_markers: parameters that stand in a graph as markers become collectives."""

from __future__ import annotations

import pytest
import torch

from stepgraph.placement.passes.place_markers import place_markers
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.invariants import check_invariants
from stepgraph.program.markers import REDUCE_GRAD, UNSHARD
from tests.graph_support import graph_program
from tests.support import assert_golden


def gathered(part, shape, ranks=2, dtype=torch.float32, reduce_dtype=torch.float32, in_parts=True):
    return UNSHARD(part, shape, dtype, reduce_dtype, in_parts, ranks, "7", "dp")


def linear(x, weight, bias, **how):
    return torch.nn.functional.linear(
        x, gathered(weight, [5, 3], **how), gathered(bias, [5], **how)
    )


def parts(rows=2):
    """Rank 1's rows of 5: two, where rank 0 has three."""
    return torch.ones(rows, 3, requires_grad=True), torch.ones(rows, requires_grad=True)


def kinds(program):
    return [KINDS[node.target] for node in program.operations() if is_collective(node)]


def test_uneven_shards_are_padded_gathered_and_cut():
    before = graph_program(linear, torch.ones(4, 3), *parts())
    after = place_markers(before.copy())
    assert_golden(__file__, "place_markers", before, after)
    assert kinds(after) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_what_every_rank_has_whole_is_reduced_only():
    def whole(x, weight, bias):
        return linear(x, weight, bias, in_parts=False)

    program = place_markers(graph_program(whole, torch.ones(4, 3), *parts(rows=5)))
    assert kinds(program) == ["all_reduce"] * 2
    check_invariants(program)


@pytest.mark.parametrize("training", [True, False])
def test_ranks_with_more_and_fewer_rows_have_the_same_operations(training):
    """Collectives are merged by where they stand: ranks that merged others would not meet."""

    def targets(rows):
        given = [part.detach().requires_grad_(training) for part in parts(rows)]
        program = place_markers(graph_program(linear, torch.ones(4, 3), *given))
        return [node.target for node in program.operations()]

    assert targets(3) == targets(2) and targets(2)


def test_the_only_row_is_a_part():
    def one(x, weight, bias):
        return torch.nn.functional.linear(x, gathered(weight, [1, 3]), gathered(bias, [1]))

    programs = [
        place_markers(graph_program(one, torch.ones(4, 3), *parts(rows))) for rows in (1, 0)
    ]
    for program in programs:
        assert kinds(program) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
        check_invariants(program)


def test_one_rank_needs_no_collective():
    def alone(x, weight, bias):
        return linear(x, weight, bias, ranks=1)

    program = place_markers(graph_program(alone, torch.ones(4, 3), *parts(rows=5)))
    assert kinds(program) == []
    check_invariants(program)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_half_the_bytes_travel_and_the_gradient_is_the_parameters(reduce_dtype):
    def half(x, weight, bias):
        how = {"dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
        return linear(x.bfloat16(), weight, bias, **how)

    program = place_markers(graph_program(half, torch.ones(4, 3), *parts()))
    types = [n.meta["val"].dtype for n in program.operations() if is_collective(n)]
    assert types == [torch.bfloat16] * 2 + [reduce_dtype] * 2
    gradients = [v for role, v in zip(program.outputs, program.output_values, strict=True)][1:]
    assert {value.dtype for value in gradients} == {torch.float32}


def test_a_parameter_that_is_read_twice_is_gathered_once():
    def twice(x, weight):
        return (x @ gathered(weight, [5, 3]).t()) @ gathered(weight, [5, 3])

    program = place_markers(graph_program(twice, torch.ones(4, 3), parts()[0]))
    assert kinds(program).count("all_gather") == 1


def test_a_parameter_that_is_a_result_is_no_input():
    def result(weight):
        return gathered(weight, [5, 3], in_parts=False)

    program = place_markers(graph_program(result, parts(rows=5)[0]))
    assert program.results[0].op != "placeholder"


def test_no_marker_is_left():
    program = place_markers(graph_program(linear, torch.ones(4, 3), *parts()))
    assert not [n for n in program.operations() if n.target in (UNSHARD, REDUCE_GRAD)]
