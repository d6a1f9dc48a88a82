"""stepgraph compiles a PyTorch training step."""

from stepgraph.api.check import check
from stepgraph.api.engine import Engine
from stepgraph.api.own_operators import register_operator
from stepgraph.api.padding import PaddedBatches, pad_batches
from stepgraph.api.parallelize import parallelize
from stepgraph.api.plan import Plan, plan
from stepgraph.equivalence.comparing import CheckReport
from stepgraph.errors import StepgraphError
from stepgraph.runtime.recompiles import no_recompiles

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
