"""Whether tensors show the memory that they showed: by words, and by storages, all alike."""

import pytest
import torch
from torch import nn

from stepgraph.torch_internals import shown_memory
from stepgraph.torch_internals.shown_memory import ShownMemory


@pytest.fixture(params=["words", "storages"])
def parameters(request, monkeypatch):
    """Some parameters; where torch has words elsewhere, storages are compared."""
    assert shown_memory._PLACES  # of this release
    if request.param == "storages":
        monkeypatch.setattr(shown_memory, "_PLACES", ())
    return [nn.Parameter(torch.randn(size)) for size in (3, 4, 5)]


def write(one, _):
    one.data.add_(1)
    one.detach().copy_(torch.zeros_like(one))


def use(one, other):
    one.grad = torch.ones_like(one)
    one.requires_grad_(False)
    (one.view(-1), one.detach(), other.untyped_storage())


def assign(one, _):
    one.data = one.data.clone()


def assign_a_view(one, other):
    one.data = other.data[:3]


def convert(one, _):
    one.data = one.data.double()


def swap(one, _):
    torch.utils.swap_tensors(one, nn.Parameter(torch.randn(3)))


@pytest.mark.parametrize("what", [write, use])
def test_what_is_written_is_the_same_memory(parameters, what):
    shown = ShownMemory(parameters)
    what(parameters[0], parameters[1])
    assert shown.same()


@pytest.mark.parametrize("what", [assign, assign_a_view, convert, swap])
def test_another_memory_is_seen(parameters, what):
    shown = ShownMemory(parameters)
    assert shown.same()
    what(parameters[0], parameters[1])
    assert not shown.same()
    assert ShownMemory(parameters).same()


def test_none_show_none():
    assert ShownMemory([]).same()
