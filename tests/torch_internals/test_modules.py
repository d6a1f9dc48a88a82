"""A model that is looked at before every call looks as it is, whatever was done to it between."""

import copy
from collections import UserDict

import pytest
from torch import nn

from stepgraph.torch_internals.modules import Watched, look_at
from stepgraph.torch_internals.writes import _COUNTS


def model():
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(shared, nn.Dropout(0.5)), shared)


def tie(m):
    m[0].weight = m[2].weight


def replace_a_part(m):
    m[1] = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


def put_none(m):
    m[1].register_module("2", None)
    m[0].register_parameter("bias", None)


CHANGES = [
    lambda m: None,
    lambda m: m.eval(),
    lambda m: m[1][1].eval(),
    tie,
    replace_a_part,
    put_none,
    lambda m: m.append(nn.Linear(2, 2)),
    lambda m: m.register_forward_hook(lambda *_: None),
    lambda m: m[1][0].register_forward_pre_hook(lambda *_: None),
    lambda m: m[0].register_full_backward_hook(lambda *_: None),
    lambda m: m[0]._forward_hooks.update({-7: lambda *_: None}),  # by no handle
    lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
]


class HasItElsewhere(nn.Module):
    """Whether it trains is no attribute of its own."""

    mode = True

    def __init__(self):
        super().__init__()
        del self.training

    def __getattr__(self, name):
        return HasItElsewhere.mode if name == "training" else super().__getattr__(name)


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_seen(change):
    made = model()
    watched = Watched(made)
    watched.look()
    watched.look()
    before = watched.look()
    assert watched.look() is before or not _COUNTS  # it is not looked at where nothing was written
    change(made)
    found, expected = watched.look(), look_at(made)
    assert [*map(id, found.parameters)] == [*map(id, made.parameters())]
    assert found.training == expected.training == tuple(m.training for m in made.modules())
    assert (found.forward_hooks, found.backward_hooks) == (
        expected.forward_hooks,
        expected.backward_hooks,
    )
    assert (
        change is CHANGES[0]
        or [*map(id, found.parameters)] != [*map(id, before.parameters)]
        or found != before
    )


def replace_attributes(m):
    m[0].__dict__ = dict(m[0].__dict__)


def copy_a_part(m):
    m._modules["0"] = copy.copy(m[0])


def replace_parameters(m):
    m[0]._parameters = UserDict(m[0]._parameters)


def hook_twice(m):
    m[0].register_forward_hook(lambda *_: None)
    m[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "first, then",
    [
        (replace_attributes, lambda m: m[0].eval()),
        (copy_a_part, lambda m: m[0].eval()),
        (replace_parameters, lambda m: m[0]._parameters.update(weight=None)),
        (hook_twice, lambda m: m[0]._forward_hooks.move_to_end(min(m[0]._forward_hooks))),
    ],
)
def test_it_is_seen_behind_another_that_is_equal(first, then):
    made = model()
    watched = Watched(made)
    for change in (lambda m: None, first, then):
        change(made)
        for _ in range(4):
            assert watched.look() == look_at(made)


def test_what_the_attributes_do_not_say_is_looked_at(monkeypatch):
    made = nn.Sequential(HasItElsewhere())
    watched = Watched(made)
    for mode in (True, True, True, False):
        monkeypatch.setattr(HasItElsewhere, "mode", mode)
        assert watched.look().training == (True, mode)


def test_hooks_that_were_taken_off_are_gone():
    made = model()
    watched = Watched(made)
    before = watched.look()
    made.register_forward_hook(lambda *_: None).remove()
    assert watched.look() == before


def test_a_part_that_moves_to_its_neighbour_is_seen():
    made = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), nn.Sequential(nn.Dropout(0.5)))
    watched = Watched(made)
    watched.look()
    moved = made[0].pop(1).eval()
    made[1].insert(0, moved)
    assert watched.look() == look_at(made)


def test_the_last_layer_that_moves_to_an_empty_container_is_seen():
    made = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), nn.Sequential())
    watched = Watched(made)
    before = watched.look()
    made[1].append(made[0].pop(1))
    moved = watched.look()
    assert moved.structure != before.structure
    made[0].append(made[1].pop(0))
    assert watched.look().structure == before.structure
