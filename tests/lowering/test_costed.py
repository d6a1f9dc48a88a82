"""What predictions are told of pieces: on the host alone."""

import pytest

from stepgraph import plan
from stepgraph.pipeline import as_executed
from stepgraph.program.metadata import meta
from tests.support import adamw, tower


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_pieces_are_those_of_the_host(device):
    """What a GPU offloads lies on the host, and is no reason."""
    model, batch = tower(6)
    asked = {"example": batch, "optimizer": adamw(model)}
    memory = {"*": "offload"} if device == "h100" else "none"
    made = plan(
        model,
        mesh="dp=1",
        placement="ddp",
        device=device,
        compute_dtype=None,
        memory=memory,
        **asked,
    )
    step = as_executed(made.programs(model, **asked), "inductor")["step"]
    devices = {meta(node)["val"].device.type for node in step.operations() if "copy" in str(node)}
    assert any("piece" in meta(node) for node in step.operations()) == (device == "cpu")
    assert device == "cpu" or "cpu" in devices
