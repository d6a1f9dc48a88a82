"""Copies to the host and back: as they are on the host, and what they ask of a device's streams."""

import contextlib

import torch

from stepgraph import torch_internals
from stepgraph.program import copies
from stepgraph.program.copies import (
    TO_DEVICE,
    TO_HOST,
    TO_HOST_INTO,
    WAIT_COPY,
    WAIT_HOST,
    keeping_host_memory,
)

HOST = torch.device("cpu")


def test_on_the_host_a_copy_has_memory_of_its_own_laid_out_alike():
    x = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    started = TO_HOST(x)
    held = WAIT_COPY(started, x)
    assert held.data_ptr() == started.data_ptr() != x.data_ptr()
    assert held.stride() == x.stride()
    x.zero_()
    back = WAIT_COPY(TO_DEVICE(held, HOST), held)
    assert back.data_ptr() != held.data_ptr()
    assert torch.equal(back.permute(1, 2, 0).flatten(), torch.arange(24.0))


def test_of_a_device_what_is_offloaded_is_on_the_host():
    with torch_internals.new_fake_mode():
        x = torch.empty(4, 3, device="cuda").t()
        held = WAIT_COPY(TO_HOST(x), x)
        back = WAIT_COPY(TO_DEVICE(held, torch.device("cuda")), held)
    assert held.device == HOST and back.device.type == "cuda"
    assert held.stride() == back.stride() == x.stride()


class Streams:
    """In place of a device's module: writes down what it is asked for."""

    def __init__(self):
        self.log, self.current, self.made = [], "compute", 0

    def current_stream(self, device):
        return Stream(self, "compute")

    def Stream(self, device):  # noqa: N802
        self.made += 1
        return Stream(self, "copies")

    @contextlib.contextmanager
    def stream(self, stream):
        self.current, before = stream.name, self.current
        yield
        self.current = before

    def Event(self):  # noqa: N802
        return Event(self, sum("record" in line for line in self.log))


class Stream:
    def __init__(self, module, name):
        self.module, self.name = module, name

    def wait_stream(self, other):
        self.module.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.module.log.append(f"{self.name} waits for event {event.number}")


class Event:
    def __init__(self, module, number):
        self.module, self.number = module, number

    def record(self, stream):
        self.module.log.append(f"record {self.number} on {stream.name}")


class Target(torch.Tensor):
    """Writes down on which stream it is copied to."""

    module: Streams

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.module.log.append(f"copy on {self.module.current}")
        return self


def test_a_wait_waits_for_its_own_copy(monkeypatch):
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(copies, "_lane", copies._Lane())
    started = []
    for _ in range(2):
        target = torch.empty(3).as_subclass(Target)
        target.module = module
        started.append(copies._start(torch.ones(3), target, torch.device("cuda", 0)))
    start = ["copies waits for compute", "copy on copies"]
    assert module.log == [*start, "record 0 on copies", *start, "record 1 on copies"]
    assert module.made == 1
    for number in (1, 0):
        module.log.clear()
        copies.wait_copy(started[number], torch.ones(3))
        assert module.log == [f"compute waits for event {number}"]
    assert not copies._lane.arrivals


def test_what_is_on_the_host_from_step_to_step_is_written_there(monkeypatch):
    held, x = torch.zeros(3), torch.arange(3.0)
    TO_HOST_INTO(held, x)
    WAIT_HOST(held, x)
    assert torch.equal(held, x)
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(copies, "_lane", copies._Lane())
    target = held.as_subclass(Target)
    target.module = module
    copies._start(x, target, torch.device("cuda", 0))
    module.log.clear()
    WAIT_HOST(held, x)
    assert module.log == ["compute waits for event 0"]
    assert not copies._lane.arrivals


def test_what_a_captured_step_writes_to_is_kept(monkeypatch):
    empty_like = torch.empty_like

    def unpinned(x, device, pin_memory):
        assert pin_memory
        return empty_like(x, device=device)

    monkeypatch.setattr(torch, "empty_like", unpinned)
    x = torch.ones(3)
    with keeping_host_memory() as kept:
        made = copies._pinned_like(x)
    copies._pinned_like(x)
    assert len(kept) == 1 and kept[0] is made
