"""What inductor makes of a step, read as text: no copy that the algorithm does not need."""

import logging
import re

import pytest
import torch
from tests.end_to_end.test_engine import Regression, pairs

import stepgraph
from stepgraph.frontends.launcher import launch

WIDTH = 64


def generated_code(preset: str) -> str:
    """Trains two steps and returns the code of the step program, as inductor logged it."""
    import os

    logger = logging.getLogger("torch._inductor.graph.__output_code")
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    torch._logging.set_logs(output_code=True)
    handler = Keep()
    logger.addHandler(handler)
    try:
        model = Regression(width=WIDTH)
        engine = stepgraph.Engine(
            model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            plan=preset,
            lowering="inductor",
        )
        rank = int(os.environ.get("RANK", "0"))
        with torch._inductor.config.patch(force_disable_caches=True):
            for step in range(2):
                engine.step(pairs(seed=2 * step + rank))
    finally:
        logger.removeHandler(handler)
        torch._logging.set_logs()
    return max(texts, key=len)


def calls(code: str) -> str:
    """The body of the generated ``call`` function."""
    return code.split("def call(self, args):")[-1].split("return (")[0]


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_state_is_updated_in_place(preset):
    (code, _) = launch(generated_code, preset, ranks=2)
    body = calls(code)
    # A parameter or state is copied only if some buffer of its size is made and copied into it.
    assert "copy_(" not in body
    if preset == "zero1":  # new parameters are gathered straight into the parameters, or merged
        assert re.search(r"all_gather_into_tensor", body)
