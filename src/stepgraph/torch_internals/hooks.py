"""Hooks, where torch keeps them out of sight."""

import torch
import torch.optim.optimizer as _optimizers


def gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks on its gradient (which a captured graph would drop)."""
    return bool(getattr(tensor, "_backward_hooks", None)) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """The hooks on a parameter's gradient now run for another; handles still remove them."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, table, None):
            setattr(new, table, getattr(old, table))


def step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks would run around an optimizer's ``step()``: its own, or those of all optimizers."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _optimizers._global_optimizer_pre_hooks
        or _optimizers._global_optimizer_post_hooks
    )
