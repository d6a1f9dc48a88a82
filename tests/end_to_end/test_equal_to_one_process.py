"""Every preset, mesh, memory policy and number of micro-batches gives the run of one process."""

import pytest

from stepgraph.equivalence.one_process import OneProcessRun
from tests.end_to_end.training import CLIP, STEPS, adamw, compare, llama_batch, tiny_llama

PRESETS = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("memory", ["none", "full", "checkpoint"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_ten_steps_equal_plain_pytorch(preset, ranks, memory, micro_batches):
    model = tiny_llama(checkpoint=memory == "checkpoint")
    run = OneProcessRun(
        model,
        optimizer=adamw(model.parameters()),
        mesh=f"dp={ranks}",
        plan=preset,
        memory="full" if memory == "full" else None,
        micro_batches=micro_batches,
        max_grad_norm=CLIP,
    )
    losses = [run.step(llama_batch(step)).item() for step in range(STEPS)]
    compare(losses, run.parameters())
    assert run.compiled.notes == []
    if memory != "none":
        assert any("recomputed_from" in n.meta for n in run.programs["step"].operations())
