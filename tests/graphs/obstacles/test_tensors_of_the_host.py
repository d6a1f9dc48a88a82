"""Tensors of the host: read, copied, computed, and numbers of it that a graph would hold."""

import torch

from stepgraph.lowering.graphs.obstacles import find_obstacles
from tests.graphs.programs import CUDA, named, shown, traced

aten = torch.ops.aten
HOST = torch.device("cpu")


def fetched(x):
    return aten._to_copy.default(aten._to_copy.default(x, device=HOST), device=torch.device("cuda"))


def test_copies_both_ways():
    why = "it copies between host and device, which a capture refuses from memory that may move"
    do = "keep it on the device, or move it in the batch, before the step"
    assert named(fetched, (4, 4)) == [
        f"net/to [net] {why}\n(net.py): {do}",
        f"net/to.1 [net] {why}\n(net.py): {do}",
    ]


def test_a_table_of_the_host():
    found = named(lambda x: aten.index.Tensor(x, [aten.arange.default(4, device=HOST)]), (4, 4))
    assert found == [
        "net/arange [net] the host computes it, once at capture and not when the graph runs again\n"
        "(net.py): make it on the device (device=x.device)",
        "net/index [net] it reads a tensor of the host\n(net.py): keep it on the device: register it as a "
        "buffer, or pass it in the batch",
    ]


def test_a_number_of_the_host_that_changes():
    program = traced(lambda x, y: aten.mul.Tensor(x, y), (4, 4), ())
    node = program.placeholders[1]
    node.meta["val"] = torch.empty((), device="meta")
    with program.placeholders[0].meta["val"].fake_mode:
        node.meta["val"] = torch.empty((), device=HOST)
    assert shown(find_obstacles(program, CUDA)) == [
        "net/mul [net] it reads a number of the host, which the graph would hold as it was at capture\n"
        "(net.py): make it a tensor of the device: a buffer that is changed in place, or a part of the "
        "batch"
    ]


def test_an_input_that_is_no_tensor():
    program = traced(lambda x, y: aten.mul.Tensor(x, y), (4, 4), ())
    program.placeholders[1].meta["val"] = 3.0
    assert shown(find_obstacles(program, CUDA))[0] == (
        "y_1 [] it is no tensor: the graph would hold the number that it was at capture (y_1): pass it as "
        "a tensor (torch.as_tensor)"
    )


def test_arithmetic_on_the_device_is_none():
    assert not named(lambda x: aten.mul.Tensor(x, 2.0), (4, 4))
