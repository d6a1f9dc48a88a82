"""compute_pieces_in_place: pieces lie where what they are made of lay, and are the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.lowering.passes.compute_pieces_in_place import compute_pieces_in_place
from stepgraph.lowering.passes.move_to_target import move_to_target
from stepgraph.planning.target import Target
from stepgraph.program.build import Builder
from stepgraph.program.driver import PassDriver
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD
from stepgraph.program.text import program_text
from tests.lowering.passes.in_place import HEADS, MESHES, alive_at, written
from tests.memory.heads import divided, placed
from tests.propagation import differences
from tests.sampling import sampled
from tests.support import assert_bitwise, assert_golden_text, bound

aten = torch.ops.aten


def in_place(head, *on, pieces=3, dtype=None):
    """Inputs, and every rank's own program before and after."""
    inputs, program = placed(head, *on, dtype=dtype)
    before = bound(divided(program, pieces)[0])
    return inputs, before, [compute_pieces_in_place(each.copy(), fuses=False) for each in before]


def gradient_of_labels(program):
    """Of the first piece the product that makes it, and what that reads."""
    found = next(
        n
        for n in program.operations()
        if n.target is aten.mul.Tensor
        and meta(n).get("rows_piece") == 0
        and meta(n)["val"].dim() == 2
    )
    return found.args[0], found


def test_a_piece_lies_where_what_it_is_made_of_lay():
    _, before, after = in_place("plain", pieces=2)
    text = f"{program_text(before[0], 'before')}\n"
    text += program_text(after[0], "after compute_pieces_in_place")
    assert_golden_text(__file__, "compute_pieces_in_place", text)


@pytest.mark.parametrize("head, mesh, plan", sampled([(h, *on) for h in HEADS for on in MESHES]))
def test_every_head_is_the_same_bits_on_every_rank(head, mesh, plan):
    inputs, before, after = in_place(head, mesh, plan)
    assert head == "own" or all(map(written, after))  # that one has no such operation
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


def test_a_piece_is_there_once_less():
    _, (before,), (after,) = in_place("plain")
    (node, *_) = written(after)
    size = meta(node)["val"].nbytes
    assert alive_at(before, node) - alive_at(after, node) == size


@pytest.mark.parametrize("by", ["another operation", "itself", "a view", "the caller"])
def test_what_somebody_else_reads_stays(by):
    inputs, (before,), _ = in_place("plain")
    operand, reader = gradient_of_labels(before)
    if by == "itself":
        reader.args = (operand, operand)
    elif by == "the caller":
        (role, _, value), *rows = before.output_rows
        before.set_outputs([(role, operand, value), *rows])
    else:
        view = by == "a view"
        other = (aten.t.default if view else aten.neg.default), operand
        new = Builder(before, FORWARD, operand.next)(*other)
        last = next(n for n in reversed([*before.operations()]) if meta(n)["phase"] == FORWARD)
        total = Builder(before, FORWARD, last.next)(aten.sum.default, new)
        (role, _, value), *rows = before.output_rows
        before.set_outputs([(role, total, value), *rows])
    name = meta(reader)["name"]
    after = compute_pieces_in_place(before.finish().copy(), fuses=False)
    assert name not in {meta(node)["name"] for node in written(after)}
    assert_bitwise(inputs.execute([before]), inputs.execute([after]))


@pytest.mark.parametrize("shown", ["view", "smaller", "other type"])
def test_what_is_no_memory_of_its_own_and_size_stays(shown):
    _, (before,), _ = in_place("plain")
    operand, reader = gradient_of_labels(before)
    emit = Builder(before, FORWARD, reader)
    rows, words = meta(operand)["val"].shape
    if shown == "view":
        new = emit(aten.view.default, operand, [rows, words])
    elif shown == "smaller":
        new = emit(aten.mul.Tensor, reader.args[1], 1.0)
    else:
        new = emit.cast(operand, torch.bfloat16)
    meta(new)["rows_piece"] = 0
    second = operand if shown == "smaller" else reader.args[1]
    reader.args = (new, second)
    name = meta(reader)["name"]
    after = compute_pieces_in_place(before.finish(), fuses=False)
    assert name not in {meta(node)["name"] for node in written(after)}


def test_what_makes_one_kernel_of_several_operations_is_left_alone():
    _, (before,), _ = in_place("plain")
    after = PassDriver().run(compute_pieces_in_place, before.copy(), fuses=True)
    assert program_text(after, "one") == program_text(before, "one")


def test_a_program_without_pieces_is_left_alone():
    _, program = placed("plain")
    (before,) = bound(program)
    after = PassDriver().run(compute_pieces_in_place, before.copy(), fuses=False)
    assert program_text(after, "one") == program_text(before, "one")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS)
def test_on_a_gpu_as_much_is_written_in_place(head, dtype):
    """Propagated on fake tensors, not run."""
    _, before, on_host = in_place(head, "dp=2", "zero3", dtype=dtype)
    moved = move_to_target(before[0].copy(), Target("cuda", 2, True, 2**20))
    after = compute_pieces_in_place(moved, fuses=False)
    assert len(written(after)) == len(written(on_host[0]))
    assert differences(after, "cuda") == []
