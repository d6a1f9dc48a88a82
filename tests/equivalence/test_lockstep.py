"""run_lockstep: every rank interprets its own graph, collectives are computed on all."""

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.equivalence.lockstep import run_lockstep
from tests.support import bound, compiled, mlp, regression_batch, values


@pytest.fixture(scope="module")
def programs():
    return bound(compiled(mlp(), regression_batch(), ranks=2).programs["step"])


def inputs_of(programs):
    return [
        [
            torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            for node in p.placeholders
        ]
        for p in programs
    ]


def test_ranks_at_different_collectives_are_a_deadlock(programs):
    first, second = (program.copy() for program in programs)
    collective = next(n for n in second.operations() if n.target is torch_internals.ALL_GATHER)
    collective.target = torch_internals.ALL_REDUCE
    collective.args = (collective.args[0], "sum", "dp")
    with pytest.raises(AssertionError, match="different collectives"):
        run_lockstep([first, second], inputs_of(programs))


def test_a_collective_that_others_never_reach_is_a_deadlock(programs):
    first, second = (program.copy() for program in programs)
    for node in reversed(list(second.operations())):
        if (
            node.target is torch_internals.WAIT
            and node.args[0].target is torch_internals.ALL_REDUCE
        ):
            node.replace_all_uses_with(node.args[0].args[0])
    second.finish()
    with pytest.raises(AssertionError, match="never reach|different"):
        run_lockstep([first, second], inputs_of(programs))


def test_ranks_that_disagree_on_a_replica_are_found():
    model, batch = mlp(), regression_batch()
    program = compiled(model, batch, ranks=2).programs["step"]

    def spoil(rank, node, value):
        if rank == 1 and node.meta["name"].startswith("mean/wait_tensor"):
            value.add_(1)

    with pytest.raises(AssertionError, match="same replica differ"):
        values(model, batch).execute(program, observe=spoil)


def test_the_observer_sees_every_operation_of_every_rank(programs):
    seen = []
    run_lockstep(programs, inputs_of(programs), lambda rank, node, value: seen.append((rank, node)))
    assert len(seen) == sum(len(list(program.operations())) for program in programs)
