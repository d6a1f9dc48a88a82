"""The device table, and the roofline by hand."""

import numpy as np
import pytest
import torch

from stepgraph.cost.device import NOT_MEASURED
from stepgraph.cost.devices import DEVICES, find_device
from stepgraph.errors import UsageError
from tests.cost.hand_made import round_device


@pytest.mark.parametrize("name", DEVICES)
def test_a_row_achieves_less_than_its_publisher_says_and_names_its_source(name):
    device = find_device(name)
    assert device.name == name and device.error == NOT_MEASURED
    assert {torch.float32, torch.bfloat16} <= set(device.matmul)
    assert all(device.matmul[dtype] < device.peak[dtype] for dtype in device.matmul)
    assert "data sheet" in device.source and "achieved" in device.source
    assert device.intra.bandwidth > device.inter.bandwidth
    assert device.intra.latency < device.inter.latency
    assert device.ranks_per_node == 8


def test_peaks_are_those_of_the_data_sheets():
    peaks = {name: device.peak[torch.bfloat16] / 1e12 for name, device in DEVICES.items()}
    assert peaks == {"a100": 312, "h100": 989, "h200": 989, "b200": 2250, "mi300x": 1307}


def test_newer_devices_are_faster():
    order = ["a100", "h100", "h200", "b200"]
    for before, after in zip(order, order[1:], strict=False):
        assert DEVICES[before].memory_bandwidth < DEVICES[after].memory_bandwidth
        assert DEVICES[before].capacity <= DEVICES[after].capacity


def test_an_unknown_device_lists_near_misses():
    with pytest.raises(UsageError, match="did you mean 'h100'") as error:
        find_device("h10")
    assert "mi300x" in str(error.value)


def test_the_slower_of_compute_and_memory_counts():
    device = round_device()
    assert device.seconds(2e12, 1e9, torch.float32) == pytest.approx(2.0)
    assert device.seconds(2e12, 3e9, torch.float32) == pytest.approx(3.0)
    assert device.seconds(2e12, 0, torch.bfloat16) == pytest.approx(0.5)


def test_an_unknown_type_runs_like_float32():
    assert round_device().seconds(1e12, 0, torch.int8) == pytest.approx(1.0)


def test_small_work_runs_at_half_its_rate_where_the_curve_says_so():
    device = round_device(half_flops=1e9, half_bytes=1e6)
    assert device.seconds(1e9, 0, torch.float32) == pytest.approx(2e-3)
    assert device.seconds(0, 1e6, torch.float32) == pytest.approx(2e-3)
    assert device.seconds(1e12, 0, torch.float32) == pytest.approx(1.001)


def test_a_kernel_has_a_floor_and_no_work_is_no_kernel():
    device = round_device(kernel_seconds=1e-3)
    assert device.seconds(1, 1, torch.float32) == 1e-3
    assert device.seconds(0, 0, torch.float32) == 0


def test_what_is_part_of_a_kernel_pays_neither_floor_nor_ramp():
    device = round_device(kernel_seconds=1e-3, half_bytes=1e6)
    assert device.seconds(0, 1e3, torch.float32, starts=False) == pytest.approx(1e-6)


def test_arrays_give_arrays():
    device = round_device(kernel_seconds=1e-3)
    found = device.seconds(np.array([0.0, 1.0, 2e12]), np.array([0.0, 5e9, 0.0]), torch.float32)
    assert found == pytest.approx([0.0, 5.0, 2.0])
    numbers = [device.seconds(f, b, torch.float32) for f, b in ((0, 0), (1, 5e9), (2e12, 0))]
    assert found == pytest.approx(numbers)


def test_other_products_run_at_their_share_of_the_rate():
    device = round_device(families={"attention": 0.5})
    assert device.seconds(1e12, 0, torch.float32, family="attention") == pytest.approx(2.0)
    assert device.seconds(1e12, 0, torch.float32, family="convolution") == pytest.approx(1.0)


def test_nearer_memory_is_faster_and_between_sizes_it_is_interpolated():
    device = round_device(caches=((1e3, 1e10), (1e5, 1e8)))
    assert device.bandwidth(10) == pytest.approx(1e10)
    assert device.bandwidth(1e4) == pytest.approx(1e9)
    assert device.bandwidth(1e9) == pytest.approx(1e8)
    assert device.seconds(0, 1e5, torch.float32) == pytest.approx(1e-3)
