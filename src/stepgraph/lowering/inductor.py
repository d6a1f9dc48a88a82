"""``inductor``: torch's compiler on the whole program, its in-place writes included.

What repeats is compiled once (:mod:`stepgraph.lowering.bodies`); ``inductor_whole`` compiles it as one
graph.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.lowering.as_it_is import as_it_is
from stepgraph.lowering.bodies import in_pieces
from stepgraph.lowering.cache import Cache
from stepgraph.lowering.driver import Compiled, drive
from stepgraph.lowering.record import Executable, Lowering, no_obstacles
from stepgraph.operators.updates import UPDATE, decomposed
from stepgraph.planning.target import Target
from stepgraph.program.copies import COPY_WAITS
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM, fused_random
from stepgraph.torch_internals import host_device
from stepgraph.torch_internals.code import generate_code
from stepgraph.torch_internals.compiler import look_at_machine, precompile_headers
from stepgraph.torch_internals.inductor.whole_step import compile_with_inductor, digest_of_passes
from stepgraph.torch_internals.recording import TORCHS_NAMESPACES, below_autograd

# The whole step is one graph, already differentiated and scheduled, and inductor keeps its order: when it
# reorders for locality or peak memory, half of the waits end right behind their collectives.
SETTINGS: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}


Wanted = tuple[str, Callable[[], Compiled]]


def _wanted(module: fx.GraphModule, placeholders: Sequence[fx.Node], target: Target) -> Wanted:
    """What tells a graph from others, and what compiles it."""
    generate_code(module)
    examples = [meta(node)["val"] for node in placeholders]
    ours = {RANDOM: fused_random, UPDATE: decomposed}

    def make() -> Compiled:
        return compile_with_inductor(
            module, examples, SETTINGS, target.overlaps, ours, awaits_copy=COPY_WAITS
        )

    shapes = [(e.shape, e.stride(), e.dtype, e.device) for e in examples]
    return f"{module.code} {shapes} {target.overlaps} {digest_of_passes(ours)!r}", make


def _compiled(graphs: Sequence[tuple[fx.GraphModule, Sequence[fx.Node]]], target: Target) -> list:
    cache = Cache()
    if target.device_type == host_device().type:
        # Inductor would find this out again in the folder of each graph.
        cache.compiled([("what this machine computes with", look_at_machine)])
    return cache.compiled([_wanted(*graph, target) for graph in graphs])


def _make_whole(program: Program, target: Target) -> Executable:
    (run,) = _compiled([(program.module, program.placeholders)], target)

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        return run(list(inputs))

    return _recording_nothing(program, execute)


def _make(program: Program, target: Target) -> Executable:
    pieces = in_pieces(program)
    if pieces is None:
        return _make_whole(program, target)
    compiled = [body for body in pieces.bodies if not body.plain]
    graphs = [(body.module(), body.graph.find_nodes(op="placeholder")) for body in compiled]
    made = iter(_compiled(graphs, target))
    run = drive(pieces, [as_it_is(b) if b.plain else next(made) for b in pieces.bodies])
    return _recording_nothing(program, run)


# Whose kernels compute no gradients of their own. Somebody else's may, and then autograd has to be there.
_OWN = {*TORCHS_NAMESPACES, "stepgraph"}


def _recording_nothing(program: Program, run: Executable) -> Executable:
    """The same, its operators' kernels called at once where that can make no difference."""
    targets = {node.target for node in program.operations()} - {operator.getitem}
    own = all(getattr(target, "namespace", None) in _OWN for target in targets)
    return below_autograd(run) if own else torch.no_grad()(run)


def _prepare(target: Target) -> None:
    if target.device_type == host_device().type:
        precompile_headers()


INDUCTOR = Lowering("inductor", no_obstacles, _make, fuses=True, prepare=_prepare)
WHOLE = Lowering("inductor_whole", no_obstacles, _make_whole, fuses=True, prepare=_prepare)
