"""What is to be known of regions under ``torch.utils.checkpoint``."""

from stepgraph.errors import name_a_few
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

WRITTEN_ONCE = (
    "buffers that are written under torch.utils.checkpoint are written once a step, as without it: {} "
    "(plain PyTorch writes them once more when it recomputes)"
)


def written_in_regions(joint: Program) -> list[str]:
    """A remark that names the buffers which a region's code writes, if there are any."""
    found = []
    for role, node, _ in joint.output_rows:
        if not isinstance(role, roles.NewBuffer):
            continue
        from_region = [node, *node.all_input_nodes]  # what was assigned is copied outside
        if any("checkpoint" in meta(each) for each in from_region):
            found.append(role.name)
    return [WRITTEN_ONCE.format(name_a_few(found))] if found else []
