"""Loops that stay the user's own: forward, backward and update are graphs, one each."""

from __future__ import annotations

import torch

import stepgraph
from tests.graphs.training import batch, model, start

STEPS = 6


def by_hand(lowering):
    """Two forwards before their backwards: what one saves is not what the other saves."""
    engine = start(lowering)
    losses = []
    for step in range(STEPS):
        pair = [engine(batch(2 * step + i)) for i in range(2)]
        engine.backward(pair[0] + 2 * pair[1])
        engine.optimizer_step()
        losses += [loss.detach() for loss in pair]
    return losses, [p.detach().full_tensor() for p in engine.model.parameters()]


def test_forward_backward_and_update(recorder):
    expected = by_hand("eager")
    found = by_hand("cuda_graph_eager")
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(one, other)
    # The forward and the backward run twice a step, the update once.
    assert sorted(graph.replays for graph in recorder.captures) == [
        STEPS - 1, 2 * STEPS - 1, 2 * STEPS - 1,
    ]  # fmt: skip


def parallel(lowering):
    made = stepgraph.parallelize(model(), plan="zero3", example=batch(0), lowering=lowering)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = made(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_module_in_a_loop_of_its_own(recorder):
    expected = parallel("eager")
    assert torch.equal(torch.stack(parallel("cuda_graph_eager")), torch.stack(expected))
    assert [graph.replays for graph in recorder.captures] == [STEPS - 1] * 2


class Printing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x, y):
        print(end="")
        return self.inner(x, y)


def test_graph_by_graph_the_update_alone_is_captured_and_that_is_told(recorder):
    made = Printing()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    engine = stepgraph.Engine(made, optimizer=optimizer, lowering="cuda_graph_eager")
    for step in range(3):
        assert engine.step(batch(step)).isfinite()
    assert [graph.replays for graph in recorder.captures] == [2]
    told = (
        "cuda_graph_eager captures steps that are one program: graph by graph it runs under eager"
    )
    assert told in engine.notes
