"""How often dynamo may compile a piece of code, where it counts all calls of ``torch.compile`` together."""

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo.config as _dynamo_config


class Limits:
    """What all that was compiled in this process may compile of one piece of code, together.

    torch 2.11 has one limit, of 8, for a code and everybody who compiles it, and runs it uncompiled from
    there on without a word. (Later ones count apart: ``torch.compile(isolate_recompiles=True)``.)
    """

    def __init__(self) -> None:
        self.sum = 0

    def raised_by(self, limit: int, compiled: Callable) -> Callable:
        """A callable of ``torch.compile`` under a limit that leaves it ``limit`` of its own."""
        self.sum += limit

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            least: dict[str, Any] = {
                name: max(self.sum, getattr(_dynamo_config, name))
                for name in ("recompile_limit", "accumulated_recompile_limit")
            }
            with _dynamo_config.patch(**least):
                return compiled(*args, **kwargs)

        return call


LIMITS = Limits()
