"""The same step on a CUDA device."""

import pytest

import stepgraph
from tests.end_to_end.training import adamw, compare, llama_batch, tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_llama_trains_as_in_plain_pytorch_on_the_cpu(lowering):
    model = tiny_llama().cuda()
    engine = stepgraph.Engine(
        model, optimizer=adamw(model.parameters()), max_grad_norm=0.5, lowering=lowering
    )
    losses = [engine.step(llama_batch(step)).item() for step in range(10)]
    compare(losses, {n: p.detach().full_tensor().cpu() for n, p in model.named_parameters()})
