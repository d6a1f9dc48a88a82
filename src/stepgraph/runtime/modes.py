"""A model's modes: training and evaluation."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, every submodule's flag put back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
