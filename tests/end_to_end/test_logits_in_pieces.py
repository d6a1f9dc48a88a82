"""Real gloo ranks whose logits are never whole train as plain PyTorch does in one process."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.planning.decisions import Decisions
from tests.support import plain_losses, tiny_llama

WORDS, WIDTH, STEPS = 512, 16, 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, labels):
        logits = torch.tanh(self.hidden(self.table(tokens))) @ self.table.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model():
    torch.manual_seed(0)
    tied = Tied()
    return tied, torch.optim.AdamW(tied.parameters(), lr=1e-2)


def batch(step):
    random = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, WORDS, (8, 32), generator=random) for _ in range(2))
    labels[0, : 10 * step] = -100
    return tokens, labels


def parts(rank):
    """What a rank brings, step by step."""
    for step in range(STEPS):
        yield tuple(tensor.chunk(2)[rank] for tensor in batch(step))


def in_pieces(plan):
    """The plan of an engine, with the logits of each program in three pieces; the rest is decided anew."""
    for key, decided in plan.decisions.items():
        memory = replace(decided.memory, pieces={"mm": 3})
        plan = plan.with_decisions(key, Decisions(decided.placement, memory))
    return plan


def train(settings):
    rank = int(os.environ["RANK"])
    tied, optimizer = model()
    engine = stepgraph.Engine(tied, optimizer=optimizer, lowering="eager", **settings)
    engine.step(next(parts(rank)))
    tied, optimizer = model()
    again = settings | {"plan": in_pieces(engine.plan)}
    engine = stepgraph.Engine(tied, optimizer=optimizer, lowering="eager", **again)
    losses = [engine.step(part).item() for part in parts(rank)]
    names = [n.meta["name"] for p in engine.programs.values() for n in p.operations()]
    return losses, "mm.piece_2" in names


def test_ranks_train_on_logits_in_pieces_as_one_process_does_on_whole_ones():
    settings = {"mesh": "dp=2", "plan": "zero3", "micro_batches": 2}
    expected = plain_losses(*model(), [batch(step) for step in range(STEPS)])
    for losses, divided in launch(train, settings, ranks=2):
        assert divided
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def steps_behind_sequence_parallelism(memory):
    """One rank of 2 x 2: the losses of some steps, and into how many pieces logits went."""
    torch.manual_seed(0)
    model = tiny_llama(layers=1, vocab_size=4096, max_position_embeddings=64)
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="dp=2,tp=2",
        plan="tp+sp+zero3", memory=memory, lowering="eager",
    )  # fmt: skip
    ids = torch.randint(0, 4096, (8, 64), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(2)[int(os.environ["RANK"]) // 2]
    losses = [float(engine.step({"input_ids": mine, "labels": mine})) for _ in range(3)]
    (decided,) = [one.memory for one in engine.plan.decisions.values()]
    return losses, dict(decided.pieces or {})


@pytest.mark.slow
def test_rows_gathered_piece_by_piece_on_real_ranks():
    whole, pieces = launch(steps_behind_sequence_parallelism, "none", ranks=4)[0]
    divided, in_pieces = launch(steps_behind_sequence_parallelism, "budget:5MiB", ranks=4)[0]
    assert not pieces and in_pieces.get("lm_head/mm", 1) > 1
    assert divided == pytest.approx(whole, rel=1e-6)
