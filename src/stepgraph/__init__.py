"""stepgraph compiles a PyTorch training step."""

from stepgraph.equivalence.check import CheckReport
from stepgraph.errors import StepgraphError
from stepgraph.frontends.checking import check
from stepgraph.frontends.engine import Engine
from stepgraph.frontends.padding import PaddedBatches, pad_batches
from stepgraph.frontends.parallel import parallelize
from stepgraph.frontends.planning import plan
from stepgraph.planning.plan import Plan
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
]
