"""How dynamo compiles pieces of code, where a release needs it told: how often, and with which guards."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
from torch.torch_version import TorchVersion

# Guards of torch before 2.12 remember the addresses of dictionaries, and on Python 3.12 they have used ones
# that were freed (pytorch/pytorch#183753; later releases have it off): a crash when garbage is collected.
_REMEMBERED = "use_recursive_dict_tags_for_guards"
# Seen with 2.11 on CUDA, torch alone: a backward under compiled autograd within another backward leaves
# Python's memory such that a later collection of garbage crashes. Later releases have not been tried there:
# ``benchmarks/compiled_autograd_crash.py``.
CRASHES_ON_DEVICES = TorchVersion(torch.__version__) < (2, 12)

SAFE_GUARDS: dict[str, Any] = {_REMEMBERED: False} if hasattr(_dynamo_config, _REMEMBERED) else {}


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
            with _dynamo_config.patch(**least, **SAFE_GUARDS):
                return compiled(*args, **kwargs)

        return call


LIMITS = Limits()
