"""What was measured corrects the cost model: the factors that were wrong, and nothing that is right."""

import dataclasses

import pytest
import torch

from stepgraph.cost.calibration import UNCALIBRATED
from stepgraph.cost.correction import AS_IT_IS, Correction, Measured, correct, corrected
from stepgraph.cost.predict import Prediction

COMPUTE, SENT, PEAK = 8.0, 5.0, 1000


def predicted(correction: Correction, overlapped: bool = False) -> Prediction:
    """A step that computes for 8 ms and communicates for 5, all of it beside 6 ms of that, or none."""
    compute, sent = COMPUTE * correction.compute, SENT * correction.communication
    exposed = max(0.0, sent - 0.75 * compute) if overlapped else sent
    step = compute + exposed
    return Prediction("some", step, compute, sent, exposed, 0.0, PEAK, PEAK, PEAK, {})


def on(truth: Correction, overlapped: bool = False) -> Measured:
    """What a machine that is so much slower shows."""
    found = predicted(truth, overlapped)
    return Measured(found.step_ms, found.communication_ms, round(PEAK * truth.memory))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    "truth",
    [
        Correction(compute=2.0),
        Correction(compute=0.5),
        Correction(communication=2.0),
        Correction(communication=0.5),
        Correction(compute=2.0, communication=0.5, memory=1.5),
        Correction(compute=30.0, communication=20.0),
        Correction(memory=0.5),
    ],
)
def test_what_is_wrong_is_corrected(truth, overlapped):
    found = correct(on(truth, overlapped), lambda c: predicted(c, overlapped))
    for name, factor in vars(truth).items():
        assert getattr(found, name) == pytest.approx(factor, rel=2e-3), name


@pytest.mark.parametrize("compute", [1.0, 1.15, 0.87])
@pytest.mark.parametrize("memory", [1.0, 1.09, 0.92])
def test_what_is_right_stays(compute, memory):
    truth = Correction(compute, 1.0, memory)
    assert correct(on(truth), predicted) == AS_IT_IS
    known = Correction(3.0, 0.3, 1.4)
    further = Correction(known.compute * compute, known.communication, known.memory * memory)
    assert correct(on(further), predicted, known) == known


def test_a_second_correction_starts_from_the_first():
    once = correct(on(Correction(compute=2.0)), predicted)
    again = correct(on(Correction(compute=6.0, communication=4.0)), predicted, once)
    assert (again.compute, again.communication) == pytest.approx((6.0, 4.0), rel=2e-3)
    assert correct(on(Correction(compute=6.0, communication=4.0)), predicted, again) == again


def test_without_collectives_only_computing_is_corrected():
    found = correct(Measured(2 * COMPUTE + SENT), predicted)
    assert found == Correction(compute=pytest.approx(2.0, rel=2e-3))


def test_collectives_that_took_longer_alone_than_the_whole_step_are_not_believed():
    found = correct(Measured(2 * (COMPUTE + SENT), 40 * SENT), predicted)
    assert found == Correction(2.0, 2.0)


def test_a_peak_of_which_not_all_is_seen_can_only_be_larger():
    for seen, memory in ((0.5, 1.0), (1.5, 1.5)):
        measured = Measured(COMPUTE + SENT, SENT, round(seen * PEAK), peak_at_least=True)
        assert correct(measured, predicted) == Correction(memory=memory)


def test_a_corrected_device_takes_so_much_longer():
    device = dataclasses.replace(
        UNCALIBRATED, caches=((1e4, 5e10), (1e6, 1e10)), elements={"exp": 1e-9}
    )
    slow = corrected(device, Correction(compute=4.0, communication=3.0))
    work = {"flops": 1e7, "bytes": 1e5, "dtype": torch.float32}
    for given in (work, work | {"flops": 0.0}, work | {"vector": 1.0}, work | {"bytes": 0.0}):
        scaled = given | {"vector": 4.0} if "vector" in given else given
        assert slow.seconds(**scaled) == pytest.approx(4 * device.seconds(**given))
    assert slow.elements["exp"] == 4 * device.elements["exp"]
    for kind in ("all_reduce", "reduce_scatter"):
        assert slow.collectives[kind].latency == 3 * device.collectives[kind].latency
        assert slow.collectives[kind].bandwidth == device.collectives[kind].bandwidth / 3
    assert slow.capacity == device.capacity and corrected(device, AS_IT_IS) is device


def test_it_is_shown_in_words():
    assert str(Correction(compute=2.0, memory=1.25)) == "compute x 2, memory x 1.25"
    assert str(AS_IT_IS) == "nothing"
