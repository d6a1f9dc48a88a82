"""simulate: two streams over programs written by hand."""

import pytest
import torch

from stepgraph.cost.device import Link
from stepgraph.cost.simulate import COMMUNICATION, COMPUTE, COPIES, simulate
from stepgraph.program.copies import TO_DEVICE, TO_HOST, TO_HOST_INTO, WAIT_COPY, WAIT_HOST
from stepgraph.program.program import BACKWARD, FORWARD
from tests.cost.hand_made import Written, round_device

aten = torch.ops.aten
COLLECTIVE = 0.5 * 8e6 / 1e8 + 1e-6  # an all-gather to 8 MB over two ranks of the round device


def second(node, device):
    """Every product takes 10 ms, everything else nothing."""
    return 1e-2 if node.target is aten.mm.default else 0.0


def program(products_between, mesh="dp=2"):
    """A gather, products that do not need it, and one that does."""
    write = Written({"x": (1000, 1000), "w": (500, 2000)}, mesh=mesh)
    whole = write.gather(write["w"], 2)
    last = write["x"]
    for _ in range(products_between):
        last = write(aten.mm.default, last, write["x"])
    return write.returning(write(aten.mm.default, last, whole))


def test_a_collective_beside_compute_is_hidden_as_far_as_compute_reaches():
    line = simulate(program(2), round_device(), second)
    assert line.communication_seconds == pytest.approx(COLLECTIVE)
    assert line.compute_seconds == pytest.approx(0.03)
    assert line.exposed_seconds == pytest.approx(COLLECTIVE - 0.02)
    assert line.seconds == pytest.approx(COLLECTIVE + 0.01)


def test_a_collective_that_compute_outlasts_is_not_exposed():
    line = simulate(program(6), round_device(), second)
    assert line.exposed_seconds == 0
    assert line.seconds == pytest.approx(0.07)


def test_a_device_without_overlap_stands_still():
    line = simulate(program(6), round_device(overlaps=False), second)
    assert line.exposed_seconds == pytest.approx(COLLECTIVE)
    assert line.seconds == pytest.approx(0.07 + COLLECTIVE)


def test_compute_waits_at_the_first_reader_not_at_the_wait():
    write = Written({"x": (1000, 1000), "w": (500, 2000)}, mesh="dp=2")
    whole = write(
        aten.view.default, write.gather(write["w"], 2), [1000, 2000]
    )  # a view is no reader
    first = write(aten.mm.default, write["x"], write["x"])
    line = simulate(write.returning(write(aten.mm.default, first, whole)), round_device(), second)
    starts = [event.start for event in line.events if event.stream == COMPUTE]
    assert starts == pytest.approx([0.0, COLLECTIVE])


def test_one_collective_after_the_other():
    write = Written({"a": (500, 2000), "b": (500, 2000)}, mesh="dp=2")
    first, other = write.gather(write["a"], 2), write.gather(write["b"], 2)
    line = simulate(write.returning(write(aten.add.Tensor, first, other)), round_device(), second)
    starts = [event.start for event in line.events if event.stream == COMMUNICATION]
    assert starts == pytest.approx([0.0, COLLECTIVE])
    assert line.exposed_seconds == pytest.approx(2 * COLLECTIVE)


def test_a_collective_nobody_reads_counts_to_the_end():
    write = Written({"a": (500, 2000)}, mesh="dp=2")
    line = simulate(write.returning(write.gather(write["a"], 2)), round_device(), second)
    assert line.seconds == line.exposed_seconds == pytest.approx(COLLECTIVE)


def test_phases_add_up_to_the_whole():
    write = Written({"x": (1000, 1000), "w": (500, 2000)}, mesh="dp=2")
    forward = write(aten.mm.default, write["x"], write["x"])
    write.phase = BACKWARD
    whole = write.gather(write["w"], 2)
    program = write.returning(write(aten.mm.default, forward, whole))
    line = simulate(program, round_device(), second)
    assert line.seconds_by_phase[FORWARD] == pytest.approx(0.01)
    assert line.seconds_by_phase[BACKWARD] == pytest.approx(0.01 + COLLECTIVE)
    assert sum(line.seconds_by_phase.values()) == pytest.approx(line.seconds)


def test_crowded_ranks_compute_slower_and_one_alone_does_not():
    device = round_device(crowding=1.5)
    assert simulate(program(6), device, second).compute_seconds == pytest.approx(0.105)
    alone = Written({"x": (10, 10)})
    product = alone(aten.mm.default, alone["x"], alone["x"])
    assert simulate(alone.returning(product), device, second).seconds == pytest.approx(0.01)


def test_flops_and_the_roofline_are_counted_without_a_clock_of_ones_own():
    line = simulate(program(0), round_device())
    assert line.flops == 2 * 1000 * 1000 * 2000
    assert line.compute_seconds == pytest.approx(4 * (1e6 + 2e6 + 2e6) / 1e9)


def offloaded(products):
    """A value goes to the host beside products, and back beside as many."""
    write = Written({"x": (1000, 1000)})
    value = write(aten.mm.default, write["x"], write["x"])
    last = value

    def compute():
        nonlocal last
        for _ in range(products):
            last = write(aten.mm.default, last, write["x"])

    started = write(TO_HOST, value)
    compute()
    held = write(WAIT_COPY, started, value)
    write.phase = BACKWARD
    coming = write(TO_DEVICE, held, torch.device("cpu"))
    compute()
    back = write(WAIT_COPY, coming, held)
    return write.returning(write(aten.mm.default, last, back))


COPY = 4e6 / 1e8 + 1e-6  # to the round host


@pytest.mark.parametrize("products", [0, 3, 6])
def test_copies_run_beside_compute_until_they_are_awaited(products):
    line = simulate(offloaded(products), round_device(host=Link(1e-6, 1e8)), second)
    exposed = 2 * max(COPY - 0.01 * products, 0.0)
    assert line.exposed_seconds == pytest.approx(exposed)
    assert line.seconds == pytest.approx(0.01 * (2 + 2 * products) + exposed)
    copies = [event.seconds for event in line.events if event.stream == COPIES]
    assert copies == pytest.approx([COPY, COPY])
    assert line.communication_seconds == 0


def updated(products):
    """A state comes from the host, and what it becomes is written there, beside products."""
    write = Written({"x": (1000, 1000), "state": (1000, 1000)})
    state, last = write["state"], write["x"]
    coming = write(TO_DEVICE, state, torch.device("cpu"))
    new = write(aten.mm.default, write(WAIT_COPY, coming, state), write["x"])
    write(TO_HOST_INTO, state, new)
    for _ in range(products):
        last = write(aten.mm.default, last, write["x"])
    write(WAIT_HOST, state, new)
    return write.returning(last)


@pytest.mark.parametrize("products", [0, 3, 6])
def test_what_is_written_to_the_host_is_waited_for(products):
    line = simulate(updated(products), round_device(host=Link(1e-6, 1e8)), second)
    exposed = COPY + max(COPY - 0.01 * products, 0.0)
    assert line.exposed_seconds == pytest.approx(exposed)
    assert line.seconds == pytest.approx(0.01 * (1 + products) + exposed)
    alone = simulate(updated(products), round_device())  # copies like any others
    assert alone.exposed_seconds == 0
    moved = [e.seconds for e in alone.events if e.node.target in (TO_HOST_INTO, TO_DEVICE)]
    assert moved == pytest.approx([8e6 / 1e9] * 2)


def test_where_the_device_is_the_host_a_copy_takes_its_memory_s_time():
    device = round_device()
    line = simulate(offloaded(3), device)
    copies = [event for event in line.events if event.node.target in (TO_HOST, TO_DEVICE)]
    assert [event.stream for event in copies] == [COMPUTE, COMPUTE]
    assert [event.seconds for event in copies] == pytest.approx([8e6 / 1e9] * 2)
    assert line.exposed_seconds == 0
