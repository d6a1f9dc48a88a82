"""What torch itself traces for CUDA, beside our program for it: a line of JSON for each model and type.

python -m tests.cuda_fakes.traces LIBRARY NAME:TYPE...
"""

from __future__ import annotations

import json
import operator
import sys
from typing import Any

from tests import cuda_fakes

if __name__ == "__main__":
    cuda_fakes.pretend(sys.argv[1])  # before torch is imported

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx, nn
from torch.utils import _pytree as pytree

import stepgraph
from stepgraph import torch_internals
from stepgraph.capture.decompositions import decomposition_table
from stepgraph.capture.loss import loss_of
from stepgraph.capture.module import default_loss
from stepgraph.operators.views import viewed
from stepgraph.program.metadata import meta
from stepgraph.torch_internals.export import export_graph
from tests.end_to_end import models
from tests.end_to_end.models import Brought
from tests.end_to_end.test_one_program import bring

WIDE = 32  # heads that every kernel takes as they are


def on_device(name: str, dtype: torch.dtype) -> tuple[Brought, Any]:
    """A model of the zoo and its batch as fake CUDA tensors, and their mode."""
    with torch.device("meta"):
        brought = bring(name)
    brought.model.train().to(dtype)
    for module in brought.model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # it makes a real tensor
    host = bring(name).batch

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kept, device="cuda")

    mode = torch_internals.new_fake_mode()
    with mode:
        brought.model.to_empty(device="cuda")
        return Brought(brought.model, pytree.tree_map(fake, host), brought.loss), mode


def torchs(brought: Brought, mode: Any) -> fx.Graph:
    """The joint graph that torch traces of a model as it stands."""
    leaves, tree = pytree.tree_flatten(brought.batch)
    loss = brought.loss or default_loss

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = brought.model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return loss_of(loss(self.model, pytree.tree_unflatten(list(tensors), tree)))

    with mode:
        captured = export_graph(Step(), tuple(leaves)).graph
        return torch_internals.joint_graph(captured, tuple(leaves), decomposition_table())[0].graph


def ours(brought: Brought) -> fx.Graph:
    """The step that a CUDA rank would run."""
    example = {"example": brought.batch, "loss": brought.loss}
    plan = stepgraph.plan(
        brought.model, mesh="dp=1", placement="ddp", memory="none", compute_dtype=None, **example
    )
    return plan.programs(brought.model, **example)["step"].graph


def of_torchs_backward(node: fx.Node) -> bool:
    """As AOTAutograd has tagged it."""
    return node.meta.get("partitioner_tag") == "is_backward"


def of_our_backward(node: fx.Node) -> bool:
    """As the program says."""
    return "backward" in str(meta(node).get("phase"))


def attentions(graph: fx.Graph) -> list[dict]:
    """The fused ones in order: kernel, type and layout of queries, whether there is a mask."""
    found = []
    for node in graph.nodes:
        name = str(node.target)
        if "attention" not in name:
            continue
        args = list(node.args)
        if "keyed" in name:
            kernel, args = args[0], args[1:]
        else:
            kernel = next(k for k in ("flash", "efficient", "cudnn", "flex") if k in name)
        backward = "backward" in name
        gradient_first = backward and "." in name  # a higher-order operator has queries first
        query = meta(args[1 if gradient_first else 0])["val"]
        masked = "efficient" in kernel and isinstance(args[4 if backward else 3], fx.Node)
        described = {"kernel": kernel, "backward": backward, "masked": masked}
        found.append({**described, "type": str(query.dtype), "shape": list(query.shape)})
    return found


def allocated(node: fx.Node) -> fx.Node:
    """What holds the storage of a value."""
    while node.target is not operator.getitem and (base := viewed(node)) is not None:
        node = base
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """Whatever reads a value, through views."""
    found = []
    for user in node.users:
        found += readers(user) if viewed(user) is node else [user]
    return found


def is_of_attention(node: fx.Node) -> bool:
    """Whether a value is a result of an attention, laid out otherwise or not, or its mask."""
    named = [n for n in (node, *node.all_input_nodes, *node.users) if n.op == "call_function"]
    source = node
    while "clone" in str(source.target):
        source = allocated(source.all_input_nodes[0])
    named += source.all_input_nodes if source.target is operator.getitem else []
    if "where" in str(node.target) or "constant_pad" in str(node.target):
        named += readers(node)
    return any("attention" in str(n.target) for n in named)


def saved(graph: fx.Graph, is_backward: Any) -> list[dict]:
    """What forwards leave for backwards, each storage once."""
    read: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_backward(node):
            read |= dict.fromkeys(allocated(n) for n in node.all_input_nodes if not is_backward(n))
    found = []
    for node in read:
        value = meta(node)["val"]
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        size = {"bytes": value.numel() * value.element_size(), "type": str(value.dtype)}
        told = {"operator": str(node.target), "of_attention": is_of_attention(node)}
        found.append({**told, **size})
    return found


def compared(name: str, dtype: str) -> dict:
    """Both, of one model."""
    brought, mode = on_device(name, getattr(torch, dtype))
    found = {"name": name, "type": dtype}
    for whose, graph, backward in (
        ("torch", torchs(brought, mode), of_torchs_backward),
        ("ours", ours(brought), of_our_backward),
    ):
        found[whose] = {"attentions": attentions(graph), "saved": saved(graph, backward)}
    return found


if __name__ == "__main__":
    proxy_tensor.CONSTANT_NUMEL_LIMIT = 0  # torch would compute small constants on the device
    models.WIDTH = WIDE
    for asked in sys.argv[2:]:
        print(json.dumps(compared(*asked.split(":"))), flush=True)
