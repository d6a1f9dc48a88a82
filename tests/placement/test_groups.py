"""Groups: what is decided together fits together, and repeated layers share a decision."""

from stepgraph.placement.groups import decided_here, find_groups, find_strategies, folded, share
from stepgraph.program.program import tensor_arguments
from tests.placement.planned import global_step
from tests.placement.test_solver import chain, llama


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


def test_more_layers_are_no_more_to_decide():
    two, four = (len(share(groups_of(*llama(layers))[1])) for layers in (3, 5))
    assert two == four
