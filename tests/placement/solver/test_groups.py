"""Groups: what is decided together fits together, and repeated layers share a decision."""

import pytest

from stepgraph.cost.traffic import assign_traffic
from stepgraph.placement.solver import groups as grouping
from stepgraph.placement.solver.candidates import find_strategies
from stepgraph.placement.solver.dataflow import decided_here
from stepgraph.placement.solver.groups import find_groups, folded, share
from stepgraph.program.program import tensor_arguments
from tests.placement.planned import global_step
from tests.placement.solver.test_automatic import chain, convolutional, llama


def groups_of(model, batch):
    program = global_step(model, batch, "dp=2,tp=2")
    return program, find_groups(program, find_strategies(program))


def test_paths_without_numbers():
    assert folded("model.layers.3.mlp.experts.12") == "model.layers.*.mlp.experts.*"
    assert folded("conv1.weight") == "conv1.weight"


def test_every_operation_is_in_one_group_with_options_that_read_all_its_ports():
    program, groups = groups_of(*chain(8, 16, 16, 8))
    nodes = [node for group in groups for node in group.nodes]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == {node for node in program.operations() if decided_here(node)}
    for group in groups:
        assert group.options
        for option in group.options:
            assert set(option) == set(group.nodes)
            assert all(len(option[n].inputs) == len(tensor_arguments(n)) for n in group.nodes)


@pytest.mark.slow
def test_more_layers_are_no_more_to_decide():
    few, more = (len(share(groups_of(*llama(layers))[1])) for layers in (3, 5))
    assert few == more


def test_a_kernel_that_does_many_things_is_decided_part_by_part():
    """Together the sums of a batch norm's backward have thousands of options; on a mesh, cubed."""
    program = global_step(*convolutional(2), "replicate=2,shard=2,tp=2")
    assign_traffic(program, fused=True)
    groups = find_groups(program, find_strategies(program))
    nodes = [node for group in groups for node in group.nodes]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == {node for node in program.operations() if decided_here(node)}
    assert max(len(group.options) for group in groups) <= grouping._MOST_OPTIONS
    by_name = {node.meta["name"]: group for group in groups for node in group.nodes}
    apart = by_name["body.4/sum.backward"], by_name["body.4/sum.backward.2"]
    assert apart[0] is not apart[1]
    kernels = [group.nodes[0].meta["kernel"] for group in apart]
    assert kernels[0] == kernels[1] is not None
    parts = [by_name["body.4/mul.backward.3"], by_name["body.4/sum.backward.2"]]
    assert parts[0] is parts[1], "what reads one another stays together"
