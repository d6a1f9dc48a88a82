"""The graphs of a model with graph breaks, of fake CUDA tensors: all on the device, attention fused."""

from __future__ import annotations

import pytest

from stepgraph.torch_internals.limits import CRASHES_ON_DEVICES
from tests import cuda_fakes

pytestmark = pytest.mark.skipif(bool(cuda_fakes.lacking()), reason=cuda_fakes.lacking())


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, how", [("float32", "backend"), ("bfloat16", "whole"), ("bfloat16", "engine")]
)
def test_every_graph_is_for_the_device(cuda_library, dtype, how):
    if how == "whole" and CRASHES_ON_DEVICES:
        pytest.skip("refused with this torch")
    graphs = cuda_fakes.run("graph_by_graph", cuda_library, "llama", dtype, how)
    assert len(graphs) > 6
    assert not any(graph["differences"] for graph in graphs)
    found = [[one["backward"] for one in graph["attentions"]] for graph in graphs]
    assert [False, True] in found
    if how == "whole":  # one backward of both layers
        assert found[-1] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["backend", "engine"])
def test_flex_attention_is_its_own_kernel_in_a_graph_of_many(cuda_library, how):
    graphs = cuda_fakes.run("graph_by_graph", cuda_library, "soft caps, flex", "bfloat16", how)
    assert not any(graph["differences"] for graph in graphs)
    found = [one for graph in graphs for one in graph["attentions"]]
    assert [(one["kernel"], one["backward"]) for one in found] == [("flex", False), ("flex", True)]
