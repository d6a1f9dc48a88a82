"""Every preset, mesh, memory policy and number of micro-batches gives the run of one process."""

from itertools import product

import pytest

from stepgraph.capture.step import Captured
from tests.end_to_end.training import CLIP, STEPS, adamw, compare, llama_batch, tiny_llama
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import notes_of

PRESETS, RANKS = ("ddp", "zero1", "zero2", "zero3"), (1, 2, 4)
MEMORY, MICRO_BATCHES = ("none", "full", "checkpoint"), (1, 4)
# Each preset but zero1 and zero2, either number of micro-batches, occur in those that `make test` runs.
CELLS = sampled(product(PRESETS, RANKS, MEMORY, MICRO_BATCHES), every=35)

captured: dict[tuple[bool, int], Captured] = {}


@pytest.mark.parametrize(("preset", "ranks", "memory", "micro_batches"), CELLS)
def test_ten_steps_equal_plain_pytorch(preset, ranks, memory, micro_batches):
    """The step is captured once for all presets, ranks and policies."""
    model = tiny_llama(checkpoint=memory == "checkpoint")
    key = (memory == "checkpoint", micro_batches)
    run = OneProcessRun(
        model,
        optimizer=adamw(model.parameters()),
        mesh=f"dp={ranks}",
        plan=preset,
        memory="full" if memory == "full" else None,
        micro_batches=micro_batches,
        max_grad_norm=CLIP,
        captured=captured.get(key),
    )
    losses = [run.step(llama_batch(step)).item() for step in range(STEPS)]
    captured[key] = run.captured
    compare(losses, run.parameters())
    assert notes_of(run) == []
    if memory != "none":
        assert any("recomputed_from" in n.meta for n in run.programs["step"].operations())
