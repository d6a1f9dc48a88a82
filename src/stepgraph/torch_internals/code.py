"""Graph modules whose code is generated when it is to run: passes only rewrite their graphs.

fx generates and compiles it for every new module, and never forgets the text.
"""

from contextlib import AbstractContextManager

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, with the attributes of ``root`` that it reads."""
    return _LazyGraphModule(root, graph)


def generating_late() -> AbstractContextManager[None]:
    """Modules that torch makes within generate their code late, too: most of them never run."""
    return _use_lazy_graph_module(True)


def generate_code(module: fx.GraphModule) -> None:
    """The code of the graph as it is now."""
    module.recompile()
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()
