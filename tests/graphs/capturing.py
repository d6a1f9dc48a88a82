"""What a capture would refuse, by another road than the analysis: operations run on fake CUDA tensors.

Fake tensors themselves refuse what needs data. torch's own list (of inductor) says which operators it
leaves out of its graphs.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

# Kernels that are known to wait, by ATen's sources: found by their names.
WAIT = ("histc", "mode", "_linalg_eigh", "_linalg_svd", "linalg_eig", "embedding_renorm")


class RefusedError(RuntimeError):
    """A capture would fail here; ``node``: at which operation of the Program."""

    node: fx.Node | None = None


class Capture(TorchDispatchMode):
    """Refuses what CUDA refuses while a stream is captured.

    Args:
        static: what is at the same place at every replay.
    """

    def __init__(self, static: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {storage(tensor) for tensor in static}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        keyed = "keyed_attention" in str(
            func
        )  # its generators are registered, and seeded by that number
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in given:
            if tensor.device.type != "cuda" and tensor.dim():
                raise RefusedError(f"{func} reads pageable memory")
            if tensor.device.type != "cuda" and not keyed:
                raise RefusedError(f"{func} reads a number of the host")
            if storage(tensor) not in self.known:
                raise RefusedError(f"{func} reads memory that may move")
        if func.__name__.split(".")[0] in WAIT:
            raise RefusedError(f"{func} waits")
        names = [argument.name for argument in func._schema.arguments]
        told = dict(zip(names, args, strict=False)) | (kwargs or {})
        rate = told.get("dropout_p", 0.0 if "dropout_p" in names else 1.0)
        if "philox_seed" in names:  # a backward, which is told what its forward drew by
            rate = 0.0
        if torch.Tag.nondeterministic_seeded in func.tags and not keyed and rate:
            raise RefusedError(f"{func} draws from a generator that is not registered")
        try:
            found = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RefusedError(f"{func} waits for the device") from error
        for tensor in pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type != "cuda":
                    raise RefusedError(f"{func} allocates outside the pool")
                self.known.add(storage(tensor))
                self.kept.append(tensor)  # or another could have its place
        return found


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def refusal(program: Program) -> RefusedError | None:
    """What a capture of a Program would refuse first; a convolution, which asks the driver, is believed."""
    # No environment of shapes: what depends on data is an error.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    static = {}
    with mode:
        for node in program.placeholders:
            value = meta(node)["val"]
            if not isinstance(value, torch.Tensor) or any(
                not isinstance(size, int) for size in value.shape
            ):
                return _at(RefusedError("an input whose shape is not fixed"), node)
            static[node] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    held = dict(static)
    capture = Capture(list(static.values()))
    for node in program.graph.nodes:
        if node.op == "get_attr":
            with mode:
                value = meta(node)["val"]
                held[node] = (
                    torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device="cuda"
                    )
                    if isinstance(value, torch.Tensor)
                    else value
                )
            if isinstance(held[node], torch.Tensor):
                capture.known.add(storage(held[node]))
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
        believed = "convolution" in str(node.target)
        try:
            with mode, torch.no_grad():
                if believed:
                    value = meta(node)["val"]
                    held[node] = pytree.tree_map(
                        lambda t: (
                            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                            if isinstance(t, torch.Tensor)
                            else t
                        ),
                        value,
                    )
                    for tensor in pytree.tree_leaves(held[node]):
                        if isinstance(tensor, torch.Tensor):
                            capture.known.add(storage(tensor))
                            capture.kept.append(tensor)
                    continue
                with capture:
                    held[node] = node.target(*args, **kwargs)
        except RefusedError as error:
            return _at(error, node)
    if (node := get_first_incompatible_cudagraph_node(program.module)) is not None:
        return _at(RefusedError(f"torch leaves {node.target} out of its graphs"), node)
    return None


def _at(error: RefusedError, node: fx.Node) -> RefusedError:
    error.node = node
    return error
