"""The loss in what a loss callable returns, and what it has to be."""

from typing import Any

import torch

from stepgraph.errors import LossError
from stepgraph.program.program import Value


def loss_of(result: Any) -> torch.Tensor:
    """The tensor itself, a result's ``loss`` (an item or an attribute), or its first element.

    Raises:
        LossError: none of these is a tensor.
    """
    if isinstance(result, torch.Tensor):
        return result
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if loss is None and (
        isinstance(result, (tuple, list)) and result or hasattr(result, "to_tuple")
    ):
        loss = result[0]
    if isinstance(loss, torch.Tensor):
        return loss
    keys = f" with {list(result)}" if isinstance(result, dict) else ""
    raise LossError(
        f"the loss callable returned a {type(result).__name__}{keys}, in which no loss is found",
        do="return the loss, `(loss, anything else)`, or a mapping with `loss`",
    )


def check_loss(loss: torch.Tensor | Value | None, learns: bool) -> None:
    """Refuses what cannot be trained on.

    Args:
        loss: a tensor, or its description; None: there is none.
        learns: whether a parameter gets a gradient from it.

    Raises:
        LossError
    """
    if loss is None or loss.shape != () or not loss.dtype.is_floating_point:
        got = "nothing" if loss is None else f"shape {list(loss.shape)}, {loss.dtype}"
        raise LossError(
            f"the loss must be a floating-point scalar tensor, got {got}",
            do="reduce it (`.mean()`), or return it first: `(loss, anything else)`",
        )
    if not learns:
        raise LossError(
            "no parameter gets a gradient from this loss",
            do="check requires_grad of the parameters, and that the loss is not detached",
        )
