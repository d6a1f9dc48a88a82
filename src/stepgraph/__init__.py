"""stepgraph compiles a PyTorch training step.

A name is imported when it is first asked for: what all of them need (torch's own compiler among it)
takes seconds, which the command line and its ranks spend side by side.
"""

import importlib
from typing import TYPE_CHECKING, Any

from stepgraph.errors import StepgraphError

if TYPE_CHECKING:
    from stepgraph.api.check import check
    from stepgraph.api.engine import Engine
    from stepgraph.api.own_operators import register_operator
    from stepgraph.api.padding import PaddedBatches, pad_batches
    from stepgraph.api.parallelize import parallelize
    from stepgraph.api.plan import Plan, plan
    from stepgraph.equivalence.comparing import CheckReport
    from stepgraph.runtime.recompiles import no_recompiles

_FOUND_IN = {
    "CheckReport": "equivalence.comparing",
    "Engine": "api.engine",
    "PaddedBatches": "api.padding",
    "Plan": "api.plan",
    "check": "api.check",
    "no_recompiles": "runtime.recompiles",
    "pad_batches": "api.padding",
    "parallelize": "api.parallelize",
    "plan": "api.plan",
    "register_operator": "api.own_operators",
}

__all__ = [
    "CheckReport",
    "Engine",
    "PaddedBatches",
    "Plan",
    "StepgraphError",
    "check",
    "no_recompiles",
    "pad_batches",
    "parallelize",
    "plan",
    "register_operator",
]


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FOUND_IN[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
