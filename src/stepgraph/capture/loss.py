"""The loss in what a loss callable returns, and what it has to be."""

import inspect
from typing import Any

import torch
from torch import nn

from stepgraph.errors import LossError
from stepgraph.program.program import Value

_LOSS = "loss=lambda model, batch: ..., which returns the scalar of a batch"


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
        do="return the loss, `(loss, anything else)`, or a mapping with `loss`; where it is the model that "
        f"returns this, give {_LOSS}",
    )


def forgotten_loss(error: Exception) -> LossError:
    """A model that is called without a loss, and cannot be called so."""
    return LossError(
        f"the model cannot be called with the batch: {error}",
        why="without loss= it is called as model(**batch) or model(*batch), and returns its own loss",
        do=f"give {_LOSS}, or batches that the model's forward takes",
    )


def check_call(model: nn.Module, batch: Any) -> None:
    """Refuses a batch that the model's forward does not take, where nobody gave a loss.

    Raises:
        LossError
    """
    by_name, several = isinstance(batch, dict), isinstance(batch, (tuple, list))
    args, kwargs = ((), batch) if by_name else (batch if several else (batch,), {})
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise forgotten_loss(error) from error


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
            do="reduce it (`.mean()`), or return it first: `(loss, anything else)`; where it is the model "
            f"that returns this, give {_LOSS}",
        )
    if not learns:
        raise LossError(
            "no parameter gets a gradient from this loss",
            do="check requires_grad of the parameters, and that the loss is not detached",
        )
