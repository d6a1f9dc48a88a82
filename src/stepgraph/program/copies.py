"""Copies between a device and its host's memory: each is started, and awaited where it has to be there.

::

    started = to_host(x)                  # on its way, beside what is computed
    h = wait_copy(started, x)             # x may go from here on, and h is whole
    coming = to_device(h, device)
    y = wait_copy(coming, h)              # y is whole, and h may go

What is on the host from step to step is written there: ``to_host_into(held, x)``, ``wait_host(held, x)``.
A wait reads what is copied, so that whoever frees what nobody reads frees it behind the copy: no allocator
has to be told of a second stream, and a captured step reuses memory as any other does.

Where the device is the host itself a copy is a clone, and a wait does nothing. On a device of its own,
copies run on one stream beside that of the computation, from and to pinned memory; each has an event that
its wait makes the computation wait for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from stepgraph import torch_internals
from stepgraph.torch_internals import custom_operators


class _Lane(threading.local):
    """Copies of this thread: a stream for each device, what is on its way, and who keeps pinned memory.

    ``arrivals``: where what is being copied to lies -> the event behind its copy. An entry lives from a
    start to its wait, and what is copied to lives as long.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, Any] = {}
        self.arrivals: dict[int, Any] = {}
        self.keepers: list[list[Tensor]] = []


_lane = _Lane()


@contextlib.contextmanager
def keeping_host_memory() -> Iterator[list[Tensor]]:
    """What is copied to inside stays as long as the list that is handed out.

    A captured step writes there again whenever it is replayed: nobody else may be given that memory.
    """
    kept: list[Tensor] = []
    _lane.keepers.append(kept)
    try:
        yield kept
    finally:
        _lane.keepers.pop()


def _pinned_like(x: Tensor) -> Tensor:
    """Memory of the host, which is kept by who keeps such memory now."""
    found = torch.empty_like(x, device=torch_internals.host_device(), pin_memory=True)
    for kept in _lane.keepers:
        kept.append(found)
    return found


def _start(source: Tensor, target: Tensor, device: torch.device) -> Tensor:
    """Copies on the device's stream of copies, behind all that was launched on its own so far."""
    module = torch.get_device_module(device)
    if device not in _lane.streams:
        _lane.streams[device] = module.Stream(device)
    stream = _lane.streams[device]
    # Memory of the target may have been read by what was launched last, and the source made by it.
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        target.copy_(source, non_blocking=True)
    event = module.Event()
    event.record(stream)
    _lane.arrivals[target.data_ptr()] = event
    return target


@torch.library.custom_op("stepgraph::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """Starts a copy of ``x`` into memory of its own on the host, laid out alike; pinned, for a device.

    Returns:
        where it arrives: to be read behind ``wait_copy`` alone.
    """
    if x.device.type == torch_internals.host_device().type:
        return x.clone()
    return _start(x, _pinned_like(x), x.device)


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device=torch_internals.host_device())


@torch.library.custom_op("stepgraph::to_device", mutates_args=())
def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Starts a copy of a tensor of the host into memory of ``device``, laid out alike.

    Returns:
        where it arrives: to be read behind ``wait_copy`` alone.
    """
    if device.type == x.device.type:
        return x.clone()
    found = torch.empty_like(x, device=device)
    return _start(x, found, found.device)


@to_device.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


@torch.library.custom_op("stepgraph::to_host_into", mutates_args={"held"})
def to_host_into(held: Tensor, x: Tensor) -> None:
    """``to_host`` into memory that is there already: ``held``, pinned, for a device."""
    if x.device.type == torch_internals.host_device().type:
        held.copy_(x)
    else:
        _start(x, held, x.device)


@to_host_into.register_fake
def _(held: Tensor, x: Tensor) -> None:
    return None


@torch.library.custom_op("stepgraph::wait_host", mutates_args={"held"})
def wait_host(held: Tensor, x: Tensor) -> None:
    """Awaits what ``to_host_into`` has started: behind it ``held`` is whole, and ``x`` may go."""
    event = _lane.arrivals.pop(held.data_ptr(), None)
    if event is not None:
        torch.get_device_module(x.device).current_stream(x.device).wait_event(event)


@wait_host.register_fake
def _(held: Tensor, x: Tensor) -> None:
    return None


# By hand: what ``custom_op`` makes may not return an argument.
torch.library.define("stepgraph::wait_copy", "(Tensor(a) copied, Tensor source) -> Tensor(a)")


def wait_copy(copied: Tensor, source: Tensor) -> Tensor:
    """What a copy was started into, once it is there: what is computed from here on waits for it.

    Args:
        copied: what ``to_host`` or ``to_device`` gave.
        source: what it was given.
    """
    event = _lane.arrivals.pop(copied.data_ptr(), None)
    if event is not None:
        on_host = copied.device.type == torch_internals.host_device().type
        device = source.device if on_host else copied.device
        torch.get_device_module(device).current_stream(device).wait_event(event)
    return copied


torch.library.impl("stepgraph::wait_copy", "CompositeExplicitAutograd")(wait_copy)
custom_operators.functionalize("stepgraph::wait_copy")


@torch.library.register_fake("stepgraph::wait_copy")
def _(copied: Tensor, source: Tensor) -> Tensor:
    return copied


TO_HOST = torch.ops.stepgraph.to_host.default
TO_HOST_INTO = torch.ops.stepgraph.to_host_into.default
WAIT_HOST = torch.ops.stepgraph.wait_host.default
TO_DEVICE = torch.ops.stepgraph.to_device.default
WAIT_COPY = torch.ops.stepgraph.wait_copy.default
# What completes what was started before: copies, and collectives as well.
COPY_WAITS = (WAIT_COPY, WAIT_HOST)
WAITS = frozenset({torch_internals.WAIT, *COPY_WAITS})


def is_copy(node: fx.Node) -> bool:
    """Whether a node starts a copy to the host or back."""
    return node.op == "call_function" and node.target in (TO_HOST, TO_HOST_INTO, TO_DEVICE)


def waits_for(node: fx.Node) -> list[fx.Node]:
    """What completes a collective, or a copy."""
    if node.target is TO_HOST_INTO:
        held, source = node.args
        return [u for u in source.users if u.target is WAIT_HOST and u.args[0] is held]  # type: ignore[union-attr]
    return [user for user in node.users if user.target in WAITS]


def is_on_host(node: fx.Node) -> bool:
    """Whether a value is in the host's memory, whatever the device: a copy, or the wait for it.

    Or an input that is read by way of a copy.
    """
    if node.op != "call_function":
        return node.op == "placeholder" and any(user.target is TO_DEVICE for user in node.users)
    started = node.args[0] if node.target is WAIT_COPY else node
    return isinstance(started, fx.Node) and started.target is TO_HOST
