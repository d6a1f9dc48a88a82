"""The compiled programs of an entry point, one set for each kind of batch, and why another is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from stepgraph.runtime.batches import LocalBatch
from stepgraph.runtime.executor import LoweredProgram
from stepgraph.runtime.split import SplitProgram


@dataclass
class Compiled:
    """One entry point for one batch shape: its programs in the order they run, and the result's tree."""

    programs: dict[str, LoweredProgram]
    result_tree: Any = None
    split: SplitProgram | None = None


def recompilation_reason(
    entry: str, known: Iterable[tuple], batch: LocalBatch, key: tuple, model: nn.Module
) -> str | None:
    """Why an entry point compiles again; None where it never has.

    Args:
        known: the keys it was compiled for: (batch key, requires_grad flags, module modes).
        key: the new one, of ``batch``.
    """
    known = list(known)
    if not known:
        return None
    last = known[-1]
    if key[0] != last[0] and all(key[0] != k[0] for k in known):
        return f"{entry}: new batch shape: {batch.shapes()}"
    if key[1] != last[1]:
        names = [name for name, _ in model.named_parameters()]
        changed = [n for n, a, b in zip(names, key[1], last[1], strict=True) if a != b]
        return f"{entry}: requires_grad changed: {', '.join(changed[:5])}"
    return f"{entry}: train/eval mode or forward hooks changed"


class evaluation_mode:
    """The model in evaluation mode, every submodule's flag put back afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.flags = [(module, module.training) for module in model.modules()]
        self.model = model

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        for module, training in self.flags:
            module.training = training
