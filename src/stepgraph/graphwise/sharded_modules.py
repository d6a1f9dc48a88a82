"""Lets a module's own code read parameters that are stored in parts.

A module whose parameters are DTensors gets a class of its own, below its old one, in which each parameter
is a property that returns ``unshard(this rank's part)`` while the model runs. ``named_parameters``,
``state_dict`` and ``_parameters`` are as before. Classes are made anew for every model, so that code which
was compiled for one is never run for another: torch.compile guards the types of modules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.program.markers import UNSHARD
from stepgraph.torch_internals import graphs as dynamo


@dataclass
class Gathering:
    """How parameters are gathered, and their gradients reduced: what the marker is told.

    Attributes:
        compute_dtype: of floating-point parameters in the model; None: their own.
        reduce_dtype: of reductions; None: that of the computation.
        ranks, group, mesh_dim: over which ranks.
        active: the model's code is running; at other times a module shows its parameters as they are.
        reads: told of parameters, by name, that code reads which is not compiled.
    """

    ranks: int
    group: str
    mesh_dim: str
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    active: bool = False
    reads: Callable[[str], None] | None = None


def gather_where_read(model: nn.Module, gathering: Gathering) -> None:
    """Gives every module of a model, whose parameters are DTensors, a class that gathers them."""
    made: dict[tuple, type] = {}
    for module in model.modules():
        names = tuple(name for name, tensor in module._parameters.items() if tensor is not None)
        if not names:
            continue
        key = (type(module), names)
        if key not in made:
            made[key] = class_that_reads(type(module), names, lambda n: _gathered(n, gathering))
        module.__class__ = made[key]


def class_that_reads(
    base: type,
    names: tuple[str, ...],
    reader: Callable[[str], Callable],
    others: Mapping[str, object] | None = None,
    metaclass: type = type,
) -> type:
    """A class below another, called like it.

    Args:
        names: of parameters, each of which is read by ``reader(name)(module)``.
        others: what else it has.
        metaclass: of it; that of the base where it is ``type``.
    """
    members: dict[str, object] = dict(others or {})
    members |= {name: property(reader(name)) for name in names}
    if issubclass(base, nn.RNNBase):  # reads a list of its own
        members["_flat_weights"] = property(
            lambda self: [getattr(self, name) for name in self._flat_weights_names],
            lambda self, weights: None,  # it is always made anew
        )
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    members["__doc__"] = base.__doc__
    return metaclass(base.__name__, (base,), members)


class _Part(torch.autograd.Function):
    """``to_local`` for code that no graph captures.

    The backward of DTensor's own cannot be captured by compiled autograd (torch 2.13).
    """

    @staticmethod
    def forward(ctx, parameter: DTensor) -> torch.Tensor:
        ctx.where = (parameter.device_mesh, parameter.placements)
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        part = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return DTensor.from_local(
            gradient, *ctx.where, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


dynamo.only_inlined(_Part.forward)
dynamo.only_inlined(_Part.backward)


def _gathered(name: str, gathering: Gathering) -> Callable:
    how = (gathering.ranks, gathering.group, gathering.mesh_dim)

    def read(module: nn.Module) -> torch.Tensor | None:
        if name not in module._parameters:
            raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
        parameter = module._parameters[name]
        # In a backward it is code under torch.utils.checkpoint that runs again.
        running = gathering.active or dynamo.backward_now() is not None
        if not running or not isinstance(parameter, DTensor):
            return parameter
        dtype = parameter.dtype
        if gathering.compute_dtype is not None and dtype.is_floating_point:
            dtype = gathering.compute_dtype
        reduced = gathering.reduce_dtype or dtype
        compiling = torch.compiler.is_compiling()
        if not compiling and gathering.reads is not None:
            gathering.reads(f"{name}{tuple(parameter.shape)}")
        part = parameter.to_local() if compiling else _Part.apply(parameter)
        in_parts = not parameter.placements[0].is_replicate()
        return UNSHARD(part, list(parameter.shape), dtype, reduced, in_parts, *how)

    dynamo.only_inlined(read)
    return read
