"""Embeddings with sparse gradients, and with tables that the forward would renormalise."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError, OptimizerError
from tests.one_process import OneProcessRun
from tests.support import plain_losses

WORDS = 20
KINDS = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


class Net(nn.Module):
    def __init__(self, kind="embedding", **options):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = KINDS[kind](WORDS, 6, **options), nn.Linear(6, 6)

    def forward(self, ids):
        return self.linear(self.table(ids)).square().mean()


class Functional(Net):
    def forward(self, ids):
        found = nn.functional.embedding(ids, self.table.weight, None, None, 2.0, False, True)
        return self.linear(found).square().mean()


def batch(step):
    return torch.randint(0, WORDS, (8, 4), generator=torch.Generator().manual_seed(step))


def plain(model, optimizer, steps=3):
    losses = plain_losses(model, optimizer, ((batch(step),) for step in range(steps)))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # plain PyTorch's
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [Net, Functional, lambda sparse: Net("bag", sparse=sparse)])
def test_sparse_gradients_are_dense_and_the_same_numbers(make, name):
    model, other = make(sparse=True), make(sparse=True)
    losses, wanted = plain(model, OPTIMIZERS[name](model.parameters(), lr=0.1))
    optimizer = OPTIMIZERS[name](other.parameters(), lr=0.1)
    engine = stepgraph.Engine(other, optimizer=optimizer, mesh="dp=1", lowering="eager")
    own = [engine.step(batch(step)).item() for step in range(3)]
    torch.testing.assert_close(own, losses)
    found = {name: p.detach().full_tensor() for name, p in other.named_parameters()}
    torch.testing.assert_close(found, wanted)
    assert sum("gradients are dense" in note for note in engine.notes) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_on_two_ranks_too():
    model, other = Net(sparse=True), Net(sparse=True)
    losses, _ = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    run = OneProcessRun(other, optimizer=optimizer, mesh="dp=2", plan="zero3")
    torch.testing.assert_close([run.step(batch(step)).item() for step in range(3)], losses)


def stepped(model, optimizer=None):
    engine = stepgraph.Engine(model, optimizer=optimizer, mesh="dp=1", lowering="eager")
    engine.step(batch(0))


def test_an_optimizer_of_sparse_gradients_is_an_error():
    model = Net(sparse=True)
    with pytest.raises(OptimizerError, match=r"SparseAdam[^\n]*\n[^\n]*dense gradients"):
        stepped(model, torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_renormalised_is_an_error_that_names_it(kind):
    with pytest.raises(CaptureError, match=r"max_norm=1.0\)\n  where: model.table\n"):
        stepped(Net(kind, max_norm=1.0))


def test_any_write_into_a_parameter_is_an_error_that_names_it():
    class Clamping(Net):
        def forward(self, ids):
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
            return super().forward(ids)

    with pytest.raises(CaptureError, match=r"writes into Param\(linear.weight\) in place"):
        stepped(Clamping())
