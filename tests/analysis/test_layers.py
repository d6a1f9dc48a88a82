"""find_layers: a step without some of its repeated layers is the step of a shallower model."""

from __future__ import annotations

import pytest

from stepgraph.analysis.layers import find_layers
from stepgraph.api.planner import Planner
from stepgraph.capture.module import default_loss
from stepgraph.cost.devices import find_device
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.invariants import check_invariants
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensors_of
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.solver.test_automatic import chain, gpt2, llama
from tests.support import HOST, adamw, tower


def programs_of(model, batch, **settings) -> dict[str, Program]:
    step = StepSettings("adamw", **settings)
    device = find_device(HOST.device_type)
    planner = Planner(model, batch, default_loss, adamw(model), device, step)
    return planner.captured("auto", parse_mesh("dp=2")).programs


def text_of(program: Program) -> list[tuple]:
    """What each operation does, without the names of layers."""
    return [
        (
            str(node.target),
            meta(node)["phase"],
            [tuple(t.shape) for t in tensors_of(node.meta["val"])],
        )
        for node in program.operations()
    ]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "make", [tower, pytest.param(llama, marks=SLOW), pytest.param(gpt2, marks=SLOW)]
)
def test_it_is_the_step_of_a_shallower_model(make):
    layers = find_layers(programs_of(*make(6))["step"])
    assert layers is not None and layers.most == 4
    for count in (4, 2):
        short = layers.without(count)
        check_invariants(short, after="taking layers out")
        shallow = programs_of(*make(6 - count))["step"]
        assert text_of(short) == text_of(shallow)
        assert short.input_values == shallow.input_values
        assert [type(role) for role in short.outputs] == [type(role) for role in shallow.outputs]
    assert find_layers(short) is not None, "so they can still be recomputed layer by layer"


def test_the_program_that_it_is_made_of_stays_as_it_is():
    program = programs_of(*tower(5))["step"]
    before = str(program)
    layers = find_layers(program)
    assert layers is not None
    layers.without(2)
    assert str(program) == before


@pytest.mark.parametrize("clip", [False, True])
def test_accumulators_go_with_their_layers_unless_a_norm_of_all_gradients_reads_them(clip):
    found = programs_of(*tower(6), micro_batches=2, clip=clip)
    left = []
    for program in found.values():
        layers = find_layers(program)
        assert layers is not None
        short = layers.without(3)
        check_invariants(short, after="taking layers out")
        names = {role.name for role in short.inputs if isinstance(role, roles.Param)}
        sums = {role.name for role in short.inputs if isinstance(role, roles.Accumulator)}
        assert clip or {name for name in sums if "layers" in name} <= {f"grad:{n}" for n in names}
        left.append(names)
    assert left[0] == left[1] and len(left[0]) == 10


def test_where_nothing_repeats_there_are_no_layers():
    assert find_layers(programs_of(*chain(8, 16, 8))["step"]) is None
    assert find_layers(programs_of(*tower(2))["step"]) is None, "two are too few"
