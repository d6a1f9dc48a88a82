"""Models, batches and training steps that `step_time.py` compares.

A contestant is a function from a freshly made model to a step: `step(batch)` runs forward,
backward and the optimizer once, and returns the loss. Where PyTorch offers several ways to write
the same contestant, they stand here as variants; the fastest one at each size competes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]
Builder = Callable[[nn.Module], Step]

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """One Llama shape, the batch of one rank, and how many steps a turn takes by default."""

    layers: int
    width: int
    heads: int
    intermediate: int
    batch: int
    tokens: int
    steps: int


SIZES = {
    "small": Size(2, width=64, heads=4, intermediate=176, batch=4, tokens=64, steps=40),
    "medium": Size(4, width=256, heads=4, intermediate=688, batch=4, tokens=128, steps=8),
    "large": Size(8, width=512, heads=8, intermediate=1376, batch=4, tokens=128, steps=3),
}


def make_model(size: Size, vocabulary: int) -> nn.Module:
    """A Llama with random weights in fp32; the same weights at every call, on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_batches(size: Size, vocabulary: int, rank: int, count: int = 4) -> list[Batch]:
    """A few batches of random tokens, different on every rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (size.batch, size.tokens)
    tokens = [torch.randint(vocabulary, shape, generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in tokens]


def usual_step(call: nn.Module, owner: nn.Module, fused: bool = True) -> Step:
    """The usual loop body: call the wrapped module, update the parameters that `owner` holds."""
    optimizer = torch.optim.AdamW(owner.parameters(), lr=LEARNING_RATE, fused=fused)

    def step(batch: Batch) -> Tensor:
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ddp(module: nn.Module) -> nn.Module:
    # Its fastest settings: no copies into buckets, and no broadcast of buffers that never change.
    return nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=True, forward_sync_buffers=False
    )


def _compiled(module: nn.Module) -> nn.Module:
    # Isolated: several copies of one model live in this process, and must not see, nor count,
    # each other's compiled code.
    return torch.compile(module, isolate_recompiles=True)  # type: ignore[return-value]


def ddp_eager(model: nn.Module) -> Step:
    """DistributedDataParallel."""
    return usual_step(_ddp(model), model)


def ddp_compile_inside(model: nn.Module) -> Step:
    """DDP around the compiled model: one graph, gradients reduced behind its backward."""
    return usual_step(_ddp(_compiled(model)), model)


def ddp_compile_around(model: nn.Module) -> Step:
    """The compiled DDP module: the graph is split at bucket boundaries, so reduction overlaps."""
    return usual_step(_compiled(_ddp(model)), model)


def _fully_shard(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)


def fsdp2_eager(model: nn.Module) -> Step:
    """FSDP2 on every decoder layer and the root."""
    _fully_shard(model)
    return usual_step(model, model)


def fsdp2_compile_layers(model: nn.Module) -> Step:
    """FSDP2 on decoder layers that are compiled one by one; the layers share compiled code."""
    layers = model.model.layers  # type: ignore[union-attr]
    for index, layer in enumerate(layers):  # type: ignore[arg-type]
        layers[index] = torch.compile(layer)  # type: ignore[index]
    _fully_shard(model)
    return usual_step(model, model)


def fsdp2_compile_model(model: nn.Module) -> Step:
    """The whole FSDP2 model compiled: the graph breaks where FSDP2 gathers."""
    _fully_shard(model)
    return usual_step(_compiled(model), model)


def stepgraph_engine(plan: str, lowering: str = "inductor", memory: str = "none") -> Builder:
    """A builder of stepgraph's engine under a preset plan."""

    def build(model: nn.Module) -> Step:
        import stepgraph

        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        how = {"plan": plan, "lowering": lowering, "memory": memory}
        return stepgraph.Engine(model, optimizer=optimizer, **how).step

    return build


CONTESTANTS: dict[str, dict[str, Builder]] = {
    "ddp_eager": {"": ddp_eager},
    "ddp_compile": {"inside": ddp_compile_inside, "around": ddp_compile_around},
    "fsdp2_eager": {"": fsdp2_eager},
    "fsdp2_compile": {"layers": fsdp2_compile_layers, "model": fsdp2_compile_model},
    "stepgraph_ddp": {"": stepgraph_engine("ddp")},
    "stepgraph_zero1": {"": stepgraph_engine("zero1")},
    "stepgraph_zero2": {"": stepgraph_engine("zero2")},
    "stepgraph_zero3": {"": stepgraph_engine("zero3")},
    # Its parameters stay gathered from forward to backward: there is room.
    "stepgraph_zero3_kept": {"": stepgraph_engine("zero3", memory="budget:4GiB")},
}

PEERS = {
    "ddp_eager": "ddp_compile",
    "fsdp2_eager": "fsdp2_compile",
    "stepgraph_ddp": "ddp_compile",
    "stepgraph_zero1": "ddp_compile",
    "stepgraph_zero2": "ddp_compile",
    "stepgraph_zero3": "fsdp2_compile",
    "stepgraph_zero3_kept": "stepgraph_zero3",
}
