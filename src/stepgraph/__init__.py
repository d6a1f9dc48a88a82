"""stepgraph compiles a PyTorch training step."""

from stepgraph.errors import StepgraphError
from stepgraph.frontends.engine import Engine
from stepgraph.planning.plan import Plan
from stepgraph.runtime.recompiles import no_recompiles

__all__ = ["Engine", "Plan", "StepgraphError", "no_recompiles"]
