"""LLaMA-3 8B on dp=16,tp=8, parallelized, then compiled again: what the second partition keeps and sends.

    python benchmarks/round_trip.py --json benchmarks/results/round_trip.json

One process, which says that it is the first of 128 ranks (a fake process group) and holds its shards; the
second compilation traces forward and backward anew and stops before anything runs. ``backend``: torch's
min-cut partitioner, as inductor calls it, and stepgraph's own backend. Peaks are bytes of a rank beside
parameters and their gradients' destinations: what waits for the backward, and what operations make, each
until its last reader; both partitions are counted by the same lines. ``own checkpointing``: the model has
selective checkpointing of its own, and the plan adds none. ``ops without first residuals``: the policy
keeps all that it keeps but the first sum of each block with what the block was given.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import operator
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from plan import build
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import stepgraph
from stepgraph.cost.work import size_in_bytes
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.lowering.partition import forward_and_backward
from stepgraph.memory import kept_operations
from stepgraph.operators.views import viewed
from stepgraph.pipeline import executed
from stepgraph.planning.request import Request
from stepgraph.planning.target import usual_target
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import data_mesh
from stepgraph.program.program import Program, tensors_of

MESH, RANKS, ROWS, TOKENS = "dp=16,tp=8", 128, 32, 8192
OF_THE_PEER = {
    "all-gathers of the forward": [357, 357],
    "peaks of the first, GiB": [5.02, 5.25],
    "peaks of the second, GiB": [14.58, 14.67],
}  # AutoParallel with its example's selective checkpointing, run at commit a54c2529 with torch 2.13
ABLATED = "ops without first residuals"
CASES = ("ops", ABLATED, "own checkpointing", "full", "none")
Storage = tuple[fx.Node, int]


class Stopped(Exception):
    """The graph is divided: nothing is to run."""


# -- counting


def storages(node: fx.Node) -> list[Storage]:
    """Those that a value lies in."""
    while (source := viewed(node)) is not None:
        several = isinstance(source.meta.get("val"), (tuple, list)) and viewed(source) is None
        if node.target is operator.getitem and several:
            return [(source, node.args[1])]  # type: ignore[list-item]
        node = source
    return [(node, i) for i in range(len(tensors_of(node.meta.get("val"))))]


def size(storage: Storage) -> int:
    """Bytes; of a result that is no tensor, none."""
    node, index = storage
    value = node.meta.get("val")
    part = value[index] if isinstance(value, (tuple, list)) else value
    found = size_in_bytes(part)
    return found if isinstance(found, int) else int(found.node.hint)  # a generator's state


def peak(graph: fx.Graph, held: Iterable[fx.Node], arriving: Iterable[fx.Node]) -> int:
    """Most bytes alive at once: results to the end, what arrives and what is made until its last reader."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    last: dict[Storage, int] = {}
    for at, node in enumerate(nodes):
        sources = list(node.all_input_nodes)
        if "wait_tensor" in str(node.target):
            sources += node.all_input_nodes[0].all_input_nodes  # what a collective reads, too
        last.update((storage, at) for source in sources for storage in storages(source))
    last.update((storage, len(nodes)) for node in held for storage in storages(node))
    alive = {storage for node in arriving for storage in storages(node)}
    now = most = sum(map(size, alive))
    dying: dict[int, list[Storage]] = {}
    for storage in alive:
        dying.setdefault(last.get(storage, 0), []).append(storage)
    for at, node in enumerate(nodes):
        if viewed(node) is None and not str(node.target).startswith("aten.copy_"):
            for storage in storages(node):
                now += size(storage)
                dying.setdefault(last.get(storage, at), []).append(storage)
        most = max(most, now)
        now -= sum(map(size, dying.pop(at, ())))
    return most


def gathers(graph: fx.Graph) -> dict[str, int]:
    """Collectives by kind."""
    sent = [str(n.target).split(".")[1] for n in graph.nodes if "_c10d_functional" in str(n.target)]
    return dict(sorted(Counter(name for name in sent if name != "wait_tensor").items()))


def described(forward: tuple[fx.Graph, list], backward: tuple[fx.Graph, list, list]) -> dict:
    """One partition.

    Args:
        forward: its graph, and the values that wait for the backward.
        backward: its graph, the inputs that did, and its results.
    """
    graph, saved = forward
    kept = {
        storage for node in saved for storage in storages(node) if storage[0].op != "placeholder"
    }
    other, arrived, results = backward
    return {
        "saved_values": len(kept),
        "saved_gib": sum(map(size, kept)) / 2**30,
        "forward_collectives": gathers(graph),
        "backward_collectives": gathers(other),
        "forward_peak_gib": peak(graph, saved, []) / 2**30,
        "backward_peak_gib": peak(other, results, arrived) / 2**30,
    }


def first_partition(module: torch.nn.Module) -> dict:
    """As the parallelized module runs by itself."""
    compiler = module.forward.compiler
    state = compiler.state
    program = compiler.programs["gradients"]
    final = executed(program, "eager", state.ranks.groups, PassDriver())
    return of_sides(*forward_and_backward(final))


def of_sides(first: Program, second: Program) -> dict:
    """Of two Programs."""
    saved = {role: node for role, node, _ in first.output_rows if isinstance(role, roles.Saved)}
    state = {role for role, node in saved.items() if storages(node)[0][0].op == "placeholder"}
    arrived: dict[Storage, fx.Node] = {}
    for role, node, _ in second.input_rows:
        if isinstance(role, roles.Saved) and role not in state:
            (storage, *_) = storages(saved[role])
            if (same := arrived.setdefault(storage, node)) is not node:
                node.replace_all_uses_with(same)  # two views of one memory: it is only counted
    sides = (first.graph, [*saved.values()]), (second.graph, [*arrived.values()], second.results)
    return described(*sides)


# -- compiling again


def second_partition(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict:
    """As torch's partitioner divides what is traced of it."""
    found: list[tuple[fx.GraphModule, fx.GraphModule, int]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        sides = min_cut_rematerialization_partition(joint, inputs, **options)
        found.append((*sides, options["num_fwd_outputs"]))
        return sides

    def compiled(graph: fx.GraphModule, examples: Any) -> Any:
        return make_boxed_func(stop)

    backend = aot_autograd(fw_compiler=compiled, partition_fn=partition)
    run_until_stopped(torch.compile(module, backend=backend, fullgraph=True), batch)
    ((forward, backward, results),) = found
    outputs = forward.graph.output_node().args[0]
    saved = [node for node in outputs[results:] if isinstance(node, fx.Node)]  # type: ignore[index,union-attr]
    state = {
        node.name
        for node in saved
        if storages(node)[:1] and storages(node)[0][0].op == "placeholder"
    }
    arrived = [
        node
        for node in backward.graph.find_nodes(op="placeholder")
        if node.name not in state and not node.name.startswith("tangents")
    ]
    made = [node for node in backward.graph.output_node().args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    return described((forward.graph, saved), (backward.graph, arrived, made))


def own_backend(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict:
    """As stepgraph's backend divides it."""
    compiler = GraphCompiler(Request("ddp", data_mesh(1), lowering="eager"), usual_target("cpu"))

    def backend(graph: fx.GraphModule, examples: Any) -> Any:
        compiler(graph, examples)
        return stop

    run_until_stopped(torch.compile(module, backend=backend, fullgraph=True), batch)
    (program,) = compiler.programs
    return of_sides(*forward_and_backward(executed(program, "eager", {}, compiler.driver)))


def stop(*_: Any) -> None:
    """In place of what was compiled."""
    raise Stopped


def run_until_stopped(call: Any, batch: dict[str, torch.Tensor]) -> None:
    """Compiles forward and backward."""
    torch.compiler.reset()
    try:
        call(batch)
    except Stopped:
        return
    raise AssertionError("nothing was compiled")


# -- the model


def keeps(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A user's policy: attention and products are kept."""
    name = str(operation)
    dear = "attention" in name or name.startswith(("aten.mm", "aten.addmm"))
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All that a call returns: nobody has the logits whole."""
    return model(**batch).loss


def parallelized(layers: int, case: str) -> torch.nn.Module:
    """On this rank, of 128."""
    model = build("llama3-8b", layers)
    memory = {"own checkpointing": "none", ABLATED: "ops"}.get(case, case)
    if case == "own checkpointing":
        contexts = functools.partial(create_selective_checkpoint_contexts, keeps)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    asked: dict[str, Any] = {"mesh": MESH, "compute_dtype": torch.bfloat16, "lowering": "eager"}
    asked |= {"example": {"input_ids": ids, "labels": ids}}
    by_policy = kept_operations.first_residual
    if case == ABLATED:
        kept_operations.first_residual = lambda block: []
    try:
        stepgraph.parallelize(model, plan="tp+zero3", memory=memory, loss=loss, **asked)
    finally:
        kept_operations.first_residual = by_policy
    return model.to_empty(device="cpu")


def main() -> None:
    """Compiles every case twice, and prints both partitions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "layers": given.layers or 32,
        "AutoParallel": OF_THE_PEER,
    }
    batch = torch.zeros(ROWS // 16, TOKENS, dtype=torch.int64)
    for case in given.cases.split(","):
        start = time.perf_counter()
        module = parallelized(given.layers, case)
        row = {"first": first_partition(module)}
        for name, again in (("min-cut", second_partition), ("stepgraph", own_backend)):
            row[name] = again(module, {"input_ids": batch, "labels": batch})
        found[case] = row
        for name, partition in row.items():
            print(case, name, json.dumps(partition), flush=True)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        del module
        gc.collect()
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
