"""What the named policies recompute: each forward value is kept for the backward, or recomputed in a block.

Values that cross from one block to another are kept. Whatever the policy, regions under
``torch.utils.checkpoint`` are recomputed, but for what a policy of their own keeps; parameters that were
gathered for the forward (zero3) are gathered again for the backward instead of being kept; so are
activations that ranks hold in parts (sequence-parallel norms). What ranks added up or exchanged is kept.
What patterns, or a region's own policy, send to the host is kept there, the optimizer's states too.
"""

from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.blocks import Block, find_blocks
from stepgraph.errors import MemoryPolicyError
from stepgraph.memory import regions_of_code
from stepgraph.memory.kept_operations import kept_operations
from stepgraph.memory.passes.offload_states import names_of_states
from stepgraph.memory.patterns import (
    OFFLOAD,
    OPTIMIZER,
    RECOMPUTE,
    Parts,
    are_patterns,
    parse_patterns,
)
from stepgraph.memory.presets import OPS, parse_policy
from stepgraph.memory.regions_of_code import not_crossing, sent_to_host
from stepgraph.memory.saved import comes_from, offloaded
from stepgraph.operators import table as operators
from stepgraph.operators.views import is_view
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program


def decide_by_policy(program: Program, policy: str, gather_again: bool = True) -> MemoryDecision:
    """Which forward values of a (placed) Program are recomputed; it stays as it is.

    Args:
        policy: ``none``; ``full``: every block is recomputed from its inputs; ``layers:N``: every N-th
            block is; ``ops``: every block, but for what is dear to compute; or patterns.
        gather_again: gathered parameters are not kept for the backward.

    Raises:
        UsageError: unknown policy.
        MemoryPolicyError: ``layers:N`` where no block repeats.
    """
    name, every = parse_policy(policy)
    recompute: dict[str, int] = {}
    notes: list[str] = []
    nodes = list(program.operations(FORWARD))
    regions: list[list[fx.Node]] = regions_of_code.find(nodes)
    taken = {node for region in regions for node in region}
    kept: set[fx.Node] = set()
    states: tuple[str, ...] = ()
    away = sent_to_host(nodes)
    if every:
        blocks = find_blocks(program)
        if not blocks and name == "layers":
            raise MemoryPolicyError(
                f"memory policy {policy!r} needs repeated blocks, and no block of this model repeats",
                do="use 'full' (the whole forward as one block) or torch.utils.checkpoint regions",
            )
        if not blocks:
            blocks = [Block(0, len(nodes))]
            notes.append(f"memory {name!r}: no block repeats, the whole forward is one block")
        for block in blocks[every - 1 :: every]:
            inside = nodes[block.start : block.stop]
            kept |= kept_operations(inside) if name == OPS else set()
            regions.append([n for n in inside if n not in taken])
    elif are_patterns(policy):
        patterns = parse_patterns(policy)
        if OPTIMIZER in patterns and not _has_module(program, OPTIMIZER):
            if (action := patterns.pop(OPTIMIZER)) == OFFLOAD:
                states = names_of_states(program)
            notes += ["memory: optimizer states are not computed again"] * (action == RECOMPUTE)
        parts = Parts(patterns, nodes)
        kept |= parts.saved
        regions += [[n for n in part if n not in taken] for part in parts.regions.values()]
        away += parts.offloaded
        notes += parts.notes if nodes else ()  # an update by itself has no forward
    for number, region in enumerate(regions):
        for node in not_crossing(region, program, kept - taken):
            recompute[meta(node)["name"]] = number
    for name in gathered_values(program, gather_again):
        recompute.setdefault(name, -1)
    there, in_vain = offloaded(program, recompute, away) if away else ((), [])
    offload = tuple(sorted((*there, *states))) or None
    return MemoryDecision(policy, recompute, (*notes, *in_vain), offload=offload)


def _has_module(program: Program, name: str) -> bool:
    """Whether some parameter's path says so: an update by itself has no other trace of modules."""
    paths = (role.name for role in program.inputs if isinstance(role, roles.Param))
    return any(name in path.split(".")[:-1] for path in paths)


def gathered_values(program: Program, parameters_too: bool) -> list[str]:
    """What was gathered, and what is only a view, copy or cast of it, is not kept: ranks have parts."""
    parameters = {node for role, node, _ in program.input_rows if isinstance(role, roles.Param)}
    chain: set[fx.Node] = set()
    for node in program.operations(FORWARD):
        if is_collective(node) and comes_from(node.args[0], parameters):
            again = parameters_too
        else:
            again = node.target is torch_internals.ALL_GATHER
            again |= _renames(node) and node.all_input_nodes[0] in chain
        if again:
            chain.add(node)
    return [meta(node)["name"] for node in program.operations(FORWARD) if node in chain]


def _renames(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1 and (is_view(node) or operators.of(node.target).copies)
