"""predict: a step's programs as plain numbers."""

import json

import pytest
import torch

from stepgraph.cost.devices import find_device
from stepgraph.cost.memory import memory_timeline
from stepgraph.cost.predict import predict, try_program
from stepgraph.cost.simulate import simulate
from stepgraph.errors import UsageError
from stepgraph.program.collectives import is_collective
from tests.cost.hand_made import Written, round_device
from tests.support import adamw, compiled, tiny_llama, token_batch

aten = torch.ops.aten


@pytest.fixture(scope="module")
def programs():
    model, batch = tiny_llama(2), token_batch()
    return compiled(model, batch, adamw(model), ranks=4, memory="full", micro_batches=2).programs


def test_a_step_is_its_micro_batches_and_the_last_one_with_the_optimizer(programs):
    device = find_device("h100")
    found = predict(programs, device, micro_batches=3)
    each = {name: simulate(program, device) for name, program in programs.items()}
    assert found.step_ms == pytest.approx(
        1e3 * (2 * each["accumulate"].seconds + each["step"].seconds)
    )
    assert predict(programs, device, 1).step_ms == pytest.approx(1e3 * each["step"].seconds)
    assert found.device == "h100" and found.error == device.error


def test_a_program_by_itself(programs):
    device, program = find_device("h100"), programs["accumulate"]
    found = try_program(program, device)
    assert found.seconds == simulate(program, device).seconds
    assert found.memory.at == memory_timeline(program).at


def test_collectives_are_counted_by_phase_kind_and_mesh_dimension(programs):
    found = predict(programs, find_device("h100"), 2)
    total = sum(row["count"] for row in found.collectives.values())
    expected = sum(is_collective(n) for p in programs.values() for n in p.operations())
    assert total == expected
    assert {key[2] for key in found.collectives_by_dim} == {"dp"}
    assert {key[:2] for key in found.collectives_by_dim} == set(found.collectives)


@pytest.mark.slow
def test_peaks_by_phase_leave_the_optimizer_state_out(programs):
    found = predict(programs, find_device("h100"), 2)
    assert 0 < found.forward_peak_bytes < found.peak_bytes
    assert 0 < found.backward_peak_bytes < found.peak_bytes
    assert found.bytes_by_category["optimizer"] > 0


def test_its_json_names_what_is_counted(programs):
    found = predict(programs, find_device("h100"), 2)
    plain = json.loads(json.dumps(found.with_gap(0.01).to_json()))
    assert plain["optimality_gap"] == 0.01
    assert set(plain["collectives"]) == {"/".join(key) for key in found.collectives}


def test_without_a_step_there_is_nothing_to_predict():
    with pytest.raises(UsageError, match="no program 'step'"):
        predict({}, find_device("h100"))


def test_mfu_by_hand():
    write = Written({"x": (1000, 1000)})
    program = write.returning(write(aten.mm.default, write["x"], write["x"]))
    device = round_device(memory_bandwidth=1e30)  # twice as fast by its publisher
    assert predict({"step": program}, device).mfu == pytest.approx(0.5)


@pytest.mark.slow
def test_recomputed_products_are_time_but_not_use(programs):
    model, batch = tiny_llama(2), token_batch()
    device = round_device(memory_bandwidth=1e30, intra=round_device().intra)
    mfu = {}
    for memory in ("none", "full"):
        made = compiled(model, batch, adamw(model), memory=memory).programs
        found = predict(made, device)
        mfu[memory] = (found.mfu * found.step_ms, found.step_ms)
    assert mfu["full"][0] == pytest.approx(mfu["none"][0])
    assert mfu["full"][1] > mfu["none"][1]


def test_the_largest_costs_come_first_and_like_layers_are_one(programs):
    largest = predict(programs, find_device("h100"), 2).largest
    costs = [ms for _, ms in largest]
    assert costs == sorted(costs, reverse=True)
    assert any("layers.*" in name for name, _ in largest)
