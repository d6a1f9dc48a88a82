"""In which order inductor runs what reads and writes the same memory, and what communicates."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from stepgraph.torch_internals.storages import shared_arguments


def _one_at_a_time(nodes: list) -> list:
    """Makes each collective depend on the wait for the one before, through all later reordering.

    Inductor itself keeps only the order of collectives: fusion, or its search for the least memory, may
    start several before the first is awaited.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective, contains_wait

    if not nodes:
        return nodes
    scheduler = nodes[0].scheduler
    started = {node.get_name(): node for node in nodes if contains_collective(node)}
    wait_for: dict[str | None, list] = {None: []}  # None: of what another graph has started
    for wait in filter(contains_wait, nodes):
        reads = (scheduler.name_to_buf.get(read.name) for read in wait.unmet_dependencies)
        names = [buffer.defining_op_name() for buffer in reads if buffer is not None]
        for name in [name for name in names if name in started] or [None]:
            wait_for.setdefault(name, []).append(wait)
    for before, node in itertools.pairwise([None, *started.values()]):
        mine = next(iter(node.get_buffer_names()))
        for wait in wait_for.get(before and before.get_name(), ()):
            for buffer in wait.get_buffer_names():
                node.add_fake_dep(WeakDep(buffer, mutating_buf=mine, is_fake=True))
        node.prune_deps()
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    return scheduler.nodes


def one_collective_at_a_time() -> Any:
    """:func:`_one_at_a_time`, as inductor takes it, so that inductor can cache what it compiles with it."""
    from torch._inductor import custom_graph_pass

    if not hasattr(custom_graph_pass, "CustomSchedulerPass"):  # a torch that caches nothing then
        return _one_at_a_time
    name = custom_graph_pass.get_hash_for_files((__file__,))

    class InOrder(custom_graph_pass.CustomSchedulerPass):
        def __call__(self, nodes: list) -> list:
            return _one_at_a_time(nodes)

        def uuid(self) -> Any:
            return name

    return InOrder()


@contextlib.contextmanager
def waiting_for_writes() -> Iterator[None]:
    """A kernel whose loops are made anew goes on waiting for what is written before it reads.

    Inductor (torch 2.13) then forgets by which names it knows what was mutated: a kernel may read what a
    collective gathers before the wait for it.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    recompute = getattr(SchedulerNode, "recompute_size_and_body", None)
    if recompute is None:  # a torch that makes none anew
        yield
        return

    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        renamed = any(isinstance(read, (WeakDep, StarDep)) for read in self.read_writes.reads)
        recompute(self, *args, **kwargs)
        if not renamed:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]


@contextlib.contextmanager
def reading_before_writes() -> Iterator[None]:
    """What reads memory is computed before an operator (a fused update, a collective) writes there.

    Inductor puts off what it may compute within its readers. What was put off and reads what an operator
    writes is computed then; but inductor has listed the operator by that time (torch 2.11 to 2.15), and
    would read what was written. Of a copy into a value it knows that in time.
    """
    from torch._inductor.graph import GraphLowering

    run_node = GraphLowering.run_node

    def run_node_behind_readers(self: Any, n: fx.Node) -> object:
        for name in _written_by_others(self, n):
            self.mark_buffer_mutated(name)  # computes what reads it
        return run_node(self, n)

    GraphLowering.run_node = run_node_behind_readers  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering.run_node = run_node  # type: ignore[method-assign]


def _written_by_others(graph: Any, node: fx.Node) -> Iterator[str]:
    """Buffers that an operator writes, but for a copy: that may be computed right where it goes."""
    from torch._inductor.ir import IRNode

    if node.op != "call_function" or node.target is torch.ops.aten.copy_.default:
        return
    if not any(writes for writes, _ in shared_arguments(node.target, node.args, node.kwargs)):
        return
    args, kwargs = graph.fetch_args_kwargs_from_env(node)
    for writes, one in shared_arguments(node.target, args, kwargs):
        if writes and isinstance(one, IRNode):
            one.realize()  # type: ignore[attr-defined]
            yield one.get_name()
