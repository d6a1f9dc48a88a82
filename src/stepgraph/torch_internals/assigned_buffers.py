"""Buffers that a module's code puts others in place of: ``self.mean = 0.9 * self.mean + new``.

dynamo knows the assignment, and its export leaves it out of the graph. What was assigned is written into
the old buffer instead, as the last thing that the graph does: the graph is then the whole of the forward.
"""

import contextlib
import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import ValueMutationExisting, VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from stepgraph.torch_internals.sources import is_expression
from stepgraph.torch_internals.storages import memory_of

TABLES = ("._buffers", ".__dict__['_buffers']")  # how dynamo reached a module's


@contextlib.contextmanager
def written_in_place() -> Iterator[list[str]]:
    """Within it, torch's export captures assignments to buffers.

    Yields:
        dynamo's names of the buffers of which they could not be: another shape, or a tensor that lives
        elsewhere as well.
    """
    left: list[str] = []
    compile_subgraph = OutputGraph.compile_subgraph

    def compiled(graph: OutputGraph, tx: Any, *args: Any, **kwargs: Any) -> Any:
        _write_assigned(graph, tx, left)
        return compile_subgraph(graph, tx, *args, **kwargs)

    OutputGraph.compile_subgraph = compiled  # type: ignore[method-assign]
    try:
        yield left
    finally:
        OutputGraph.compile_subgraph = compile_subgraph  # type: ignore[method-assign]


# What dynamo makes of ``tensor.data = other``: the second one from torch 2.14 on.
_ENDS_AT_DATA = "Failed to mutate tensor data attribute"  # of a tensor that the graph itself made
_ASSIGNS_DATA = [torch.Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", None)]


def assigned_data(captured: fx.GraphModule) -> str | None:
    """Where code assigns to the ``.data`` of a tensor that it was given, in a graph of dynamo's."""
    graphs = [part.graph for part in captured.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target in _ASSIGNS_DATA:
            return node.meta.get("stack_trace") or str(node)
    return None


def assigns_behind(captured: fx.GraphModule, source: Any) -> str | None:
    """Where code assigns to the ``.data`` of what ``source`` returned in a graph, which ends there."""
    reason = getattr(captured, "compile_subgraph_reason", None)
    if reason is None or _ENDS_AT_DATA not in reason.reason:
        return None
    made = getattr(source, "overloadpacket", source)
    if not any(n.target in (source, made) for n in captured.graph.output_node().all_input_nodes):
        return None
    return "".join(traceback.format_list(reason.user_stack))


def _write_assigned(graph: OutputGraph, tx: Any, left: list[str]) -> None:
    taken = {memory_of(node.meta["example_value"]) for node in _inputs_of(graph)}
    pairs: list[tuple[Any, Any]] = []
    for table in graph.side_effects._get_modified_vars():
        source = getattr(table, "source", None)
        existing = isinstance(table.mutation_type, ValueMutationExisting)
        if source is None or not existing or not is_expression(source):
            continue
        if not source.name.endswith(TABLES):
            continue
        old, new = _by_name(table.original_items), _by_name(table.items)
        for name in dict.fromkeys(itertools.chain(old, new)):
            before, after = old.get(name), new.get(name)
            if before is after:
                continue
            pair = _tensor(before), _tensor(after)
            if None in pair or not _alike(*pair):
                left.append(f"{source.name}['{name}']")
                continue
            if _is_same(*pair):
                continue  # it was changed in place
            if memory_of(_value(pair[1])) in taken or _is_shared(graph, source, name):
                left.append(f"{source.name}['{name}']")
                continue
            taken.add(memory_of(_value(pair[1])))
            pairs.append(pair)
    _keep_returned(tx, {memory_of(_value(before)) for before, _ in pairs})
    for before, after in pairs:
        value = _value(before)
        buffer = next(
            (
                n
                for n in _inputs_of(graph)
                if memory_of(n.meta["example_value"]) == memory_of(value)
            ),
            None,
        )
        if buffer is None:
            before.call_method(tx, "copy_", [after.call_method(tx, "detach", [], {})], {})
            continue
        _read_a_copy(buffer)
        new = after.call_method(tx, "detach", [], {}).as_proxy().node
        graph.graph.call_method("copy_", (buffer, new)).meta.update(new.meta)


def _read_a_copy(buffer: fx.Node) -> None:
    """What reads a buffer reads what was in it, in the backward too, when another is written into it."""
    readers = list(buffer.users)
    if readers:
        with buffer.graph.inserting_after(buffer):
            copy = buffer.graph.call_method("clone", (buffer,))
        copy.meta["example_value"] = buffer.meta["example_value"]
        for reader in readers:
            reader.replace_input_with(buffer, copy)


def _keep_returned(tx: Any, written: set[int]) -> None:
    """What the forward returns of the old buffers is what was in them."""
    returned = getattr(tx.stack[-1] if tx.stack else None, "items", [])
    for leaves in returned[:1] if isinstance(returned, list) else ():
        for index, leaf in enumerate(getattr(leaves, "items", ())):
            tensor = _tensor(leaf)
            if tensor is not None and memory_of(_value(tensor)) in written:
                leaves.items[index] = tensor.call_method(tx, "clone", [], {})


def _is_shared(graph: OutputGraph, source: Any, name: str) -> bool:
    """Whether modules have one buffer in common, of which an assignment changes the place of one alone."""
    try:
        own = eval(source.name, {"L": graph.local_scope, "G": graph.global_scope})[name]
        modules = graph.local_scope["self"].modules()
    except Exception:  # a kind of source that is no expression
        return False
    return sum(b is own for m in modules for b in m._buffers.values()) > 1


def _inputs_of(graph: OutputGraph) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            yield node


def _by_name(items: Any) -> dict[str, VariableTracker]:
    return {getattr(key, "vt", key).as_python_constant(): value for key, value in items.items()}


def _tensor(variable: VariableTracker | None) -> Any:
    realized = None if variable is None else variable.realize()
    return realized if isinstance(realized, TensorVariable) else None


def _value(variable: Any) -> torch.Tensor:
    return variable.as_proxy().node.meta["example_value"]


def _alike(before: Any, after: Any) -> bool:
    old, new = _value(before), _value(after)
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _is_same(before: Any, after: Any) -> bool:
    old, new = _value(before), _value(after)
    where = (old.stride(), old.storage_offset()), (new.stride(), new.storage_offset())
    return memory_of(old) == memory_of(new) and where[0] == where[1]
