"""Collectives are captured with the step, and graphs go before the process group."""

import pytest
import torch.distributed as dist

from stepgraph.cli.launcher import launch
from stepgraph.errors import LoweringError
from stepgraph.runtime.ranks import leave_group
from tests.graphs.recorder import recording
from tests.graphs.test_pieces import most_frequent
from tests.graphs.training import assert_same, batch, train

STEPS = 6


def one_rank(cells):
    """What of each cell was captured, on a rank of two."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for preset, between, micro_batches in cells:
            made = recording(patch, by_operators=True)
            recorder = next(made)
            recorder.group_is_there = dist.is_initialized
            how = {"plan": preset, "memory": "full", "micro_batches": micro_batches}
            expected = train("eager", STEPS, between, **how)
            run = train("cuda_graph_eager", STEPS, between, **how)
            assert_same(run, expected)
            kinds = [str(row[0]) for graph in recorder.captures for row in graph.rows]
            collectives = sum("c10d" in kind and "wait" not in kind for kind in kinds)
            found.append((len(recorder.captures), collectives))
        rank = dist.get_rank()
        leave_group()
        assert all(graph.released for graph in recorder.captures)
        with pytest.raises(LoweringError, match="after its process group is gone"):
            run.engine._compiler.watch = None
            run.engine.step(batch(0))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return rank, found


# Placement, what cannot be captured, micro-batches; graphs, and collectives in them at least.
IN_PIECES = ("zero1", most_frequent, 1, 3, 1)
WHOLE = ("zero3", None, 2, 2, 9)


@pytest.mark.parametrize(
    "cells", [[IN_PIECES], pytest.param([WHOLE, IN_PIECES], marks=pytest.mark.slow)]
)
def test_on_two_ranks(cells):
    for rank, found in sorted(launch(one_rank, [cell[:3] for cell in cells], ranks=2)):
        assert rank in (0, 1)
        for (graphs, collectives), (*_, wanted, least) in zip(found, cells, strict=True):
            assert graphs == wanted and collectives >= least
