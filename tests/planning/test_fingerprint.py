import pytest
import torch
from torch import nn

from stepgraph.errors import PlanError
from stepgraph.planning.fingerprint import fingerprint_of
from tests.support import mlp, tiny_llama


def test_a_fingerprint_reads_names_shapes_and_types():
    found = fingerprint_of(mlp())
    assert found.parameters["first.weight"] == "float32[7, 5]"
    assert found.parameters["scale"] == "float32[]"
    assert found.buffers == {"shift": "float32[3]"}


def test_the_meta_device_gives_the_same_fingerprint():
    with torch.device("meta"):
        there = tiny_llama()
    assert fingerprint_of(there) == fingerprint_of(tiny_llama())


def test_tied_tensors_are_told_from_equal_ones():
    tied = fingerprint_of(tiny_llama(tie_word_embeddings=True))
    assert tied.parameters["lm_head.weight"] == "= model.embed_tokens.weight"
    assert "lm_head.weight is" in " ".join(tied.differences(fingerprint_of(tiny_llama())))


def refused(mine, other):
    with pytest.raises(PlanError, match="another model") as caught:
        fingerprint_of(mine).check(other)
    return str(caught.value)


def test_what_differs_is_named():
    fingerprint_of(mlp()).check(mlp(seed=3))  # values do not matter
    other = mlp()
    other.first = nn.Linear(5, 8)
    assert "first.weight is float32[8, 5], not float32[7, 5]" in refused(mlp(), other)
    assert "is float64" in refused(mlp(), mlp().double())
    assert "the model lacks parameters of the plan: scale" in refused(mlp(), mlp(scaled=False))
    assert "the plan does not know parameters: scale" in refused(mlp(scaled=False), mlp())
    other = mlp()
    other.first.weight.requires_grad_(False)
    assert "frozen only now: first.weight" in refused(mlp(), other)
    assert "frozen only in the plan: first.weight" in refused(other, mlp())
    other = mlp()
    other.register_buffer("extra", torch.zeros(2))
    assert "does not know buffers: extra" in refused(mlp(), other)


def test_many_differences_are_a_few_names():
    message = refused(tiny_llama(1), tiny_llama(9))
    assert "and 69 more" in message and len(message) < 500
