"""add_up_in_place: sums over pieces of rows lie in one memory, and are the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.cost.work import node_flops
from stepgraph.equivalence.lowered import run_lowered
from stepgraph.errors import InvariantError
from stepgraph.lowering.bodies import in_pieces
from stepgraph.lowering.passes.add_up_in_place import add_up_in_place
from stepgraph.planning.target import usual_target
from stepgraph.program.build import Builder
from stepgraph.program.driver import PassDriver
from stepgraph.program.invariants import check_invariants
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, is_write
from stepgraph.program.text import program_text
from tests.lowering.passes.in_place import HEADS, MESHES, alive_at, written
from tests.memory.heads import WIDTH, WORDS, divided, placed
from tests.sampling import sampled
from tests.support import assert_bitwise, assert_golden_text, assert_summation, bound

aten = torch.ops.aten


def in_place(head, *on, pieces=3, dtype=None):
    """Inputs, and every rank's own program before and after."""
    inputs, program = placed(head, *on, dtype=dtype)
    before = bound(divided(program, pieces)[0])
    return inputs, before, [add_up_in_place(each.copy()) for each in before]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_each_piece_adds_to_the_sum(dtype):
    _, before, after = in_place("plain", pieces=2, dtype=dtype)
    text = f"{program_text(before[0], 'before')}\n"
    text += program_text(after[0], "after add_up_in_place")
    assert_golden_text(
        __file__, f"add_up_in_place_{dtype or 'float32'}".replace("torch.", ""), text
    )


@pytest.mark.parametrize("head, mesh, plan", sampled([(h, *on) for h in HEADS for on in MESHES]))
def test_every_head_is_the_same_bits_on_every_rank(head, mesh, plan):
    inputs, before, after = in_place(head, mesh, plan)
    assert all(map(written, after))
    assert_bitwise(inputs.execute(before), inputs.execute(after))


@settings(max_examples=8)
@given(
    st.sampled_from(HEADS),
    st.sampled_from(MESHES),
    st.integers(1, 6),
    st.sampled_from([None, torch.bfloat16]),
)
def test_any_head_in_any_number_of_pieces(head, on, pieces, dtype):
    inputs, before, after = in_place(head, *on, pieces=pieces, dtype=dtype)
    assert_bitwise(inputs.execute(before), inputs.execute(after))


@pytest.mark.parametrize("dtype, halves", [(None, 1), (torch.bfloat16, 2)])
def test_the_sum_is_there_once(dtype, halves):
    _, (before,), (after,) = in_place("plain", pieces=3, dtype=dtype)
    of_weight = [node for node in written(after) if meta(node)["val"].dim() == 2]
    assert len(of_weight) == 2 * halves  # behind the first piece
    for node in of_weight:
        size = meta(node)["val"].nbytes
        assert size == WORDS * WIDTH * 4 / halves
        assert alive_at(before, node) - alive_at(after, node) >= size


def test_as_much_is_computed():
    _, (before,), (after,) = in_place("plain", pieces=3)
    assert sum(map(node_flops, before.operations())) == sum(map(node_flops, after.operations()))


def test_bodies_write_into_what_they_are_given():
    _, _, (after,) = in_place("plain", pieces=4)
    pieces = in_pieces(after)
    assert pieces is not None
    holders = [
        {id(given) for given in call.given}
        for call in pieces.calls
        if any(is_write(n) for n in call.body.graph.nodes)
    ]
    assert len(holders) == 3 and set.intersection(*holders)


def sum_and_its_reader(program):
    found = next(
        n
        for n in program.operations()
        if n.target in (aten.add.Tensor, aten.addmm.default)
        and "rows_piece" in meta(n)
        and meta(n)["val"].dim() == 2
    )
    return found.args[0], found


@pytest.mark.parametrize("by", ["another operation", "the caller"])
def test_a_sum_that_somebody_else_reads_stays(by):
    _, (before,), _ = in_place("plain")
    total, reader = sum_and_its_reader(before)
    if by == "another operation":
        total = Builder(before, FORWARD, reader.next)(aten.neg.default, total)
    (role, _, value), *rows = before.output_rows
    before.set_outputs([(role, total, value), *rows])
    name = meta(reader)["name"]
    after = add_up_in_place(before.finish())
    assert name not in {meta(node)["name"] for node in written(after)}


def test_what_a_compiler_may_leave_out_stays():
    """Of a product with ones it makes its factor: writing there would change that."""
    _, (before,), _ = in_place("plain")
    total, reader = sum_and_its_reader(before)
    emit = Builder(before, FORWARD, total.next)
    other = emit(aten.mul.Tensor, total, 1.0)
    meta(other)["rows_piece"] = 0
    reader.replace_input_with(total, other)
    name = meta(reader)["name"]
    after = add_up_in_place(before.finish())
    assert name not in {meta(node)["name"] for node in written(after)}


@pytest.mark.parametrize("head", ["there and back", "joined", "plain"])
@pytest.mark.parametrize("lowering", ["inductor", "inductor_whole"])
def test_sums_of_the_model_are_its_own(head, lowering):
    """Compiled, a cast there and back is no memory: what is added to it is not added to the logits."""
    inputs, before, after = in_place(head)
    of_model = [n for n in written(after[0]) if "adds_pieces" not in meta(n)]
    assert not of_model
    found = run_lowered(inputs, before, lowering, usual_target("cpu"))
    assert_summation(inputs.execute(before), found)


def test_what_is_in_place_is_no_program_for_other_passes():
    _, _, (after,) = in_place("plain")
    with pytest.raises(InvariantError, match="writes into an argument"):
        check_invariants(after)


def test_a_program_without_pieces_is_left_alone():
    _, program = placed("plain")
    (before,) = bound(program)
    after = PassDriver().run(add_up_in_place, before.copy())
    assert program_text(after, "one") == program_text(before, "one")
