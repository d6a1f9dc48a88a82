"""FLOPs, bytes and time of one operation, by hand."""

import pytest
import torch

from stepgraph.cost.traffic import assign_traffic
from stepgraph.cost.work import (
    bytes_moved,
    cost_group,
    family_of,
    flops_of,
    matmul_dtype,
    node_flops,
    operation_seconds,
    stored_bytes,
    vector_seconds,
)
from tests.cost.hand_made import Written, round_device

aten = torch.ops.aten


def flops(target, *shapes, **inputs):
    values = [torch.empty(shape, device="meta") for shape in shapes]
    return flops_of(target, values, target(*values))


def test_products_by_hand():
    assert flops(aten.mm.default, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert flops(aten.addmm.default, (5,), (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert flops(aten.bmm.default, (2, 3, 4), (2, 4, 5)) == 2 * 2 * 3 * 4 * 5
    assert flops(aten.baddbmm.default, (2, 3, 5), (2, 3, 4), (2, 4, 5)) == 2 * 2 * 3 * 4 * 5


def test_a_convolution_and_its_backward_by_hand():
    x, w = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(5, 3, 3, 3, device="meta")
    rest = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    y = aten.convolution.default(x, w, *rest)
    forward = flops_of(aten.convolution.default, [x, w, *rest], y)
    assert forward == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    arguments = [y, x, w, [0], *rest[1:], [True, True, False]]
    result = aten.convolution_backward.default(*arguments)
    assert flops_of(aten.convolution_backward.default, arguments, result) == 2 * forward


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_hand(causal):
    q = torch.empty(2, 4, 16, 8)
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    result = target(q, q, q, 0.0, causal)
    products = 2 * 2 * (2 * 4 * 16 * 16 * 8)
    assert flops_of(target, [q, q, q, 0.0, causal], result) == products / (2 if causal else 1)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found = flops_of(backward, [q, q, q, q, result[0], result[1], 0.0, causal], None)
    assert found == 2.5 * products / (2 if causal else 1)


def test_pointwise_work_has_no_flops():
    assert flops(aten.gelu.default, (3, 4)) == 0
    assert flops_of(len, [], None) == 0


def test_kinds_of_products():
    assert family_of(aten.mm.default) == "matmul"
    assert family_of(aten.bmm.default) == "batched"
    assert family_of(aten.convolution_backward.default) == "convolution_backward"
    attention = aten._scaled_dot_product_efficient_attention
    assert family_of(attention.default) == "attention"
    training = ["q", "k", "v", None, True]  # True: the logarithms of sums are wanted
    assert family_of(attention.default, training) == "attention"
    assert family_of(attention.default, [*training, 0.0, True]) == "attention_causal"
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert family_of(backward, [*"dqkvol", 0.0, True]) == "attention_causal_backward"


def test_causal_attention_has_a_rate_of_its_own_where_it_was_measured():
    device = round_device(families={"attention": 0.5})
    seconds = device.seconds(1e9, 0, torch.float32, family="attention_causal")
    assert seconds == device.seconds(1e9, 0, torch.float32, family="attention")
    slower = round_device(families={"attention": 0.5, "attention_causal": 0.25})
    assert slower.seconds(1e9, 0, torch.float32, family="attention_causal") == 2 * seconds


def test_a_copy_into_another_order_may_take_longer_than_its_bytes():
    write = Written({"x": (100, 200)})
    turned, cut = write(aten.t.default, write["x"]), write(aten.slice.Tensor, write["x"], 1, 0, 50)
    device = round_device(elements={"transposition": 1e-3})

    def contiguous(value):
        return write(aten.clone.default, value, memory_format=torch.contiguous_format)

    assert vector_seconds(contiguous(turned), device) == pytest.approx(20.0)
    for copy in (write(aten.clone.default, turned), contiguous(cut), contiguous(write["x"])):
        assert vector_seconds(copy, device) == 0


def test_what_an_expand_repeats_is_stored_once():
    assert stored_bytes(torch.empty(3, 1).expand(3, 100)) == 12
    assert stored_bytes((torch.empty(2), [torch.empty(3, dtype=torch.int64)])) == 32
    assert stored_bytes(torch.empty(0, 4)) == 0


def test_every_argument_is_read_and_the_result_written_where_nothing_is_fused():
    write = Written({"x": (8, 16), "w": (16, 4)})
    product = write(aten.mm.default, write["x"], write["w"])
    again = write(aten.mul.Tensor, product, product)
    program = write.returning(again)
    assign_traffic(program, fused=False)
    assert bytes_moved(product) == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert bytes_moved(again) == 4 * 3 * 8 * 4


def test_a_lookup_reads_as_many_rows_as_it_returns():
    write = Written({"table": (1000, 8), "at": lambda: torch.empty(5, dtype=torch.int64)})
    rows = write(aten.embedding.default, write["table"], write["at"])
    assert bytes_moved(rows) == 2 * 5 * 8 * 4 + 5 * 8


def test_an_operation_without_traffic_moves_everything():
    write = Written({"x": (8, 16)})
    assert bytes_moved(write(aten.neg.default, write["x"])) == 2 * 4 * 8 * 16


def test_time_is_the_roofline_and_views_take_none():
    write = Written({"x": (100, 100), "w": (100, 100)})
    device = round_device()
    view = write(aten.t.default, write["w"])
    product = write(aten.mm.default, write["x"], view)
    program = write.returning(product)
    assign_traffic(program, fused=False)
    assert operation_seconds(product, device) == pytest.approx(3 * 4e4 / 1e9)
    assert operation_seconds(view, device) == 0
    assert node_flops(product) == 2e6 and matmul_dtype(product) == torch.float32


def test_where_operations_are_called_one_by_one_each_call_costs_host_time():
    write = Written({"x": (100, 100)})
    view = write(aten.t.default, write["x"])
    program = write.returning(write(aten.neg.default, view))
    device = round_device(dispatch_seconds=1.0)
    assign_traffic(program, fused=False)
    assert operation_seconds(view, device) == 1.0
    assign_traffic(program, fused=True)
    assert operation_seconds(view, device) == 0


def test_arithmetic_counts_where_the_device_has_a_figure_for_it():
    write = Written({"x": (10, 10)})
    device = round_device(elements={"tanh": 1e-3, "power": 1.0})
    tanh = write(aten.tanh.default, write["x"])
    square = write(aten.pow.Tensor_Scalar, write["x"], 2)
    cube = write(aten.pow.Tensor_Scalar, write["x"], 3)
    assert vector_seconds(tanh, device) == pytest.approx(0.1)
    assert operation_seconds(tanh, device) == pytest.approx(0.1)
    assert vector_seconds(square, device) == 0 and vector_seconds(cube, device) == 100


def test_costs_of_like_layers_are_one_group():
    write = Written({"x": (2, 2)})
    node = write(aten.mm.default, write["x"], write["x"])
    node.meta["module"] = "model.layers.17.mlp"
    assert cost_group(node) == "model.layers.*.mlp/mm.forward"
