"""assign_traffic: what a fused chain reads and writes."""

import torch

from stepgraph import torch_internals
from stepgraph.cost.traffic import assign_traffic
from stepgraph.operators.views import is_view
from stepgraph.program.program import BACKWARD, tensor_arguments
from tests.cost.hand_made import Written
from tests.support import compiled, tiny_llama, token_batch

aten = torch.ops.aten


def traffic(program, fused=True):
    assign_traffic(program, fused)
    return {node.meta["name"]: node.meta["traffic"] for node in program.operations()}


def starts(program):
    return [node.meta["name"] for node in program.operations() if node.meta["starts"]]


def test_a_chain_reads_once_and_writes_its_end():
    write = Written({"x": (8, 8)})
    a = write(aten.add.Tensor, write["x"], 1.0)
    b = write(aten.mul.Tensor, a, write["x"])
    program = write.returning(write(aten.tanh.default, b))
    assert traffic(program) == {
        "add": ((True,), False),
        "mul": ((False, False), False),
        "tanh": ((False,), True),
    }
    assert starts(program) == ["add"]


def test_without_fusion_everything_is_read_and_written():
    write = Written({"x": (8, 8)})
    a = write(aten.add.Tensor, write["x"], 1.0)
    program = write.returning(write(aten.t.default, write(aten.mul.Tensor, a, a)))
    assert traffic(program, fused=False) == {
        "add": ((True,), True),
        "mul": ((True, True), True),
        "t": ((False,), False),
    }


def test_a_product_ends_a_chain_and_reads_from_memory():
    write = Written({"x": (8, 8)})
    a = write(aten.neg.default, write["x"])
    product = write(aten.mm.default, a, write["x"])
    program = write.returning(write(aten.add.Tensor, product, a))
    found = traffic(program)
    assert found["neg"] == ((True,), True)
    assert found["mm"] == ((True, True), True)
    assert found["add"] == ((True, True), True)  # after the product: another kernel than neg
    assert starts(program) == ["neg", "mm", "add"]


def test_a_norm_over_rows_is_one_kernel():
    write = Written({"x": (4, 16)})
    square = write(aten.pow.Tensor_Scalar, write["x"], 2)
    mean = write(aten.mean.dim, square, [-1], True)
    scale = write(aten.rsqrt.default, mean)
    program = write.returning(write(aten.mul.Tensor, write["x"], scale))
    found = traffic(program)
    assert found["pow"] == ((True,), False) and found["mul"] == ((False, False), True)
    assert not found["mean"][1] and not found["rsqrt"][1]
    assert starts(program) == ["pow"]


def test_a_sum_over_columns_ends_its_kernel():
    write = Written({"x": (4, 16)})
    total = write(aten.sum.dim_IntList, write(aten.neg.default, write["x"]), [0])
    program = write.returning(write(aten.exp.default, total))
    assert traffic(program)["sum"] == ((False,), True)
    assert traffic(program)["exp"] == ((True,), True)


def test_values_that_another_phase_reads_are_written():
    write = Written({"x": (8, 8)})
    a = write(aten.neg.default, write["x"])
    b = write(aten.exp.default, a)
    write.phase = BACKWARD
    c = write(aten.mul.Tensor, a, b)
    found = traffic(write.returning(c))
    assert found["neg"] == ((True,), True) and found["exp"] == ((False,), True)
    assert found["mul.backward"] == ((True, True), True)


def test_constants_and_views_cost_nothing():
    write = Written({"x": (8, 8)})
    ones = write(aten.full.default, [8, 8], 1.0)
    view = write(aten.view.default, write(aten.add.Tensor, write["x"], ones), [64])
    found = traffic(write.returning(view))
    assert found == {
        "full": ((), False),
        "add": ((True, False), True),
        "view": ((False,), False),
    }


def test_what_is_written_in_place_is_not_read():
    write = Written({"p": (8, 8), "x": (8, 8)})
    new = write(aten.add.Tensor, write["p"], write["x"])
    copy = write(torch_internals.mutable_copy, write["p"], new)
    program = write.returning(copy)
    assert traffic(program, fused=False)["copy_"] == ((False, True), True)
    fused = traffic(program)
    assert fused["add"] == ((True, True), False) and fused["copy_"] == ((False, False), True)


def test_a_collective_reads_from_memory_and_its_result_is_read_from_there():
    write = Written({"x": (8, 8)}, mesh="dp=2")
    whole = write.gather(write(aten.neg.default, write["x"]), 2)
    found = traffic(write.returning(write(aten.exp.default, whole)))
    assert found["neg"][1] and found["exp"] == ((True,), True)


def test_a_whole_step_moves_less_when_it_is_fused():
    from stepgraph.cost.work import bytes_moved

    program = compiled(tiny_llama(1), token_batch(length=16)).programs["step"]
    moved = {}
    for fused in (False, True):
        assign_traffic(program, fused)
        moved[fused] = sum(bytes_moved(node) for node in program.operations() if not is_view(node))
        for node in program.operations():
            reads, _ = node.meta["traffic"]
            assert len(reads) == len(tensor_arguments(node))
    assert 0.2 * moved[False] < moved[True] < 0.8 * moved[False]


def test_what_was_fused_before_is_not_where_nothing_is():
    write = Written({"x": (8, 8)})
    program = write.returning(write(aten.tanh.default, write(aten.neg.default, write["x"])))
    assign_traffic(program, fused=True)
    assign_traffic(program, fused=False)
    assert not any("kernel" in node.meta for node in program.operations())
