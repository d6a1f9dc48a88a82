"""What a compiled step is predicted to take: by the programs that ranks run, not those that users see."""

from __future__ import annotations

from collections.abc import Mapping

from stepgraph.cost.devices import Device
from stepgraph.cost.predict import Prediction, predict
from stepgraph.cost.traffic import assign_traffic
from stepgraph.lowering.final import foreseen
from stepgraph.program.program import Program

_FUSES = {"inductor"}


def forecast(
    programs: Mapping[str, Program], device: Device, lowering: str, micro_batches: int = 1
) -> Prediction:
    """Predicts a step of placed Programs as they would be lowered; they stay as they are.

    Args:
        programs: by name, as an engine shows them.
        device: what they would run on.
        lowering: whether operations run one by one or fused.
    """
    final = {name: foreseen(program, device.overlaps) for name, program in programs.items()}
    for program in final.values():
        assign_traffic(program, lowering in _FUSES)
    return predict(final, device, micro_batches)
