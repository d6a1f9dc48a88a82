"""Gradients of what is given to a parallelized module: chained modules, two of them against each other."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import UsageError

STEPS, ROWS = 3, 8
TOLERANCE = 64 * torch.finfo(torch.float32).eps
PLANS = [("ddp", "dp=2"), ("zero3", "dp=2"), ("zero1", "dp=2"), ("tp", "tp=2"), ("auto", "dp=2")]


class InTwo(nn.Module):
    """Two parts with a graph break between them; ``whole=False`` leaves it out."""

    def __init__(self, first, second, whole):
        super().__init__()
        self.first, self.second, self.whole = first, second, whole

    def forward(self, x):
        x = self.first(x).relu()
        if not self.whole:
            torch._dynamo.graph_break()
        return self.second(x)


def generator(whole=True):
    torch.manual_seed(0)
    return InTwo(nn.Linear(4, 8), nn.Linear(8, 6), whole)


def critic(whole=True):
    torch.manual_seed(1)
    return InTwo(nn.Linear(6, 8), nn.Linear(8, 1), whole)


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parallel(model, width, plan, mesh):
    return stepgraph.parallelize(
        model, mesh=mesh, plan=plan, example=(torch.zeros(ROWS, width),), lowering="eager"
    )


def adversarial(g, d, part):
    """A training loop as scripts have it: it knows nothing of ranks but their part of the data."""
    of_g, of_d = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (g, d))
    loss = F.binary_cross_entropy_with_logits
    for step in range(STEPS):
        real, z = part(noise(ROWS, 6, seed=step)), part(noise(ROWS, 4, seed=100 + step))
        one, zero = torch.ones(real.shape[0], 1), torch.zeros(real.shape[0], 1)
        fake = g(z)
        of_d.zero_grad()
        (loss(d(real), one) + loss(d(fake.detach()), zero)).backward()
        of_d.step()
        of_g.zero_grad()
        loss(d(fake), one).backward()
        of_g.step()
    return g, d


def whole(model):
    named = model.named_parameters()
    parts = {name: p.detach() for name, p in named}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parts.items()}


def of_this_rank(mesh):
    rank = int(os.environ["RANK"])
    return (lambda x: x) if mesh.startswith("tp") else (lambda x: x.chunk(2)[rank])


def gradient_of(x, value):
    x = x.clone().requires_grad_()
    value(x).backward()
    return x.grad


def adversaries_and_gradients():
    """One rank: what the loops train, and gradients of an input, per plan, whole and with graph breaks."""
    found = []
    for plan, mesh in PLANS:
        for captured_whole in (True, False) if plan in ("ddp", "zero3") else (True,):
            part = of_this_rank(mesh)
            g = parallel(generator(captured_whole), 4, plan, mesh)
            d = parallel(critic(captured_whole), 6, plan, mesh)
            adversarial(g, d, part)
            x = part(noise(ROWS, 6, seed=7))
            learned = gradient_of(x, lambda x, d=d: d(x).square().mean())
            for parameter in d.parameters():
                parameter.requires_grad_(False)
            frozen = gradient_of(x, lambda x, d=d: d(x).square().mean())
            found.append((plan, mesh, whole(g), whole(d), learned, frozen))
    return found


@pytest.mark.slow
def test_two_modules_against_each_other_train_as_in_one_process():
    g, d = adversarial(generator(), critic(), lambda x: x)
    for rank, results in enumerate(launch(adversaries_and_gradients, ranks=2)):
        assert len(results) == len(PLANS) + 2
        for plan, mesh, found_g, found_d, learned, frozen in results:
            for found, wanted in ((found_g, whole(g)), (found_d, whole(d))):
                for name, value in wanted.items():
                    torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=plan)
            x = noise(ROWS, 6, seed=7)
            own = x if mesh.startswith("tp") else x.chunk(2)[rank]
            expected = gradient_of(own, lambda x: d(x).square().mean())  # what DDP's rank has
            torch.testing.assert_close(learned, expected, rtol=1e-3, atol=1e-6)
            assert torch.equal(learned, frozen)


class OwnLoss(nn.Module):
    def __init__(self, whole):
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.whole = nn.Linear(6, 6), whole

    def forward(self, x):
        y = self.linear(x)
        if not self.whole:
            torch._dynamo.graph_break()
        return y.square().mean()


def chained():
    """One rank: a module in front of one that returns the global batch's loss."""
    part, found = of_this_rank("dp=2"), []
    for captured_whole in (True, False):
        g = parallel(generator(), 4, "zero3", "dp=2")
        last = parallel(OwnLoss(captured_whole), 6, "ddp", "dp=2")
        last(g(part(noise(ROWS, 4, seed=3)))).backward()
        found.append({name: p.grad.full_tensor() for name, p in g.named_parameters()})
    return found


def test_a_module_in_front_of_one_that_returns_the_global_loss_learns_from_it():
    g = generator()
    OwnLoss(True)(g(noise(ROWS, 4, seed=3))).backward()
    for gradients in launch(chained, ranks=2)[0]:
        for name, parameter in g.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_comes_and_goes_compiles_once_for_each():
    d = parallel(critic(), 6, "ddp", "dp=1")
    x = noise(ROWS, 6, seed=0)
    for _ in range(2):
        assert d(x).requires_grad
        assert gradient_of(x, lambda x: d(x).sum()).abs().max() > 0
        with torch.no_grad():
            assert not d(x.clone().requires_grad_()).requires_grad
    compiler = d.forward.compiler
    assert compiler.stats.compiles == 3
    assert "its gradient wanted" in compiler.stats.recompiles[0]


def test_under_compute_dtype_an_input_has_a_gradient_of_its_own_type():
    d = stepgraph.parallelize(
        critic(), plan="ddp", example=(torch.zeros(ROWS, 6),), lowering="eager",
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    x = noise(ROWS, 6, seed=0)
    found = gradient_of(x, lambda x: d(x).float().sum())
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, gradient_of(x, lambda x: critic()(x).sum()), rtol=0.05, atol=0.02
    )


def test_a_second_derivative_is_an_error_that_says_what_to_do():
    d = parallel(critic(), 6, "ddp", "dp=1")
    x = noise(ROWS, 6, seed=0).requires_grad_()
    (first,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="a gradient of a gradient"):
        first.square().sum().backward()


def test_an_engines_batch_may_require_a_gradient_too():
    engine = stepgraph.Engine(
        critic(), loss=lambda m, x: m(x).square().mean(), plan="ddp", lowering="eager"
    )
    x = noise(ROWS, 6, seed=0)
    found = gradient_of(x, engine)
    torch.testing.assert_close(found, gradient_of(x, lambda x: critic()(x).square().mean()))
