"""Lets the parts of a model be called on their own: ``m.encode(x)``, ``m.layers[0](x)``.

What is compiled is the model as a whole. A part that is called from outside runs as it stands, in the
caller's own autograd graph, and every parameter is gathered where it is read; its gradient is reduced as
that of the whole module is. For that, each module has a class of its own, below its old one, while nothing
is captured: its methods say when the model's code is running. Reads at other times (an optimizer's, a
state dict's, an initialisation's) find the DTensors.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from stepgraph.capture.mixed_types import mixed_types_error
from stepgraph.capture.module import in_dtype
from stepgraph.capture.refusals import line_of
from stepgraph.errors import CaptureError
from stepgraph.graphwise.sharded_modules import class_that_reads
from stepgraph.runtime.compiler import Compiler
from stepgraph.torch_internals import dtensors, pytree
from stepgraph.torch_internals import graphs as dynamo

MIXED = "mixed torch.Tensor and DTensor"
ON_THEIR_OWN = (
    "parts of the module are called on their own: they run as they stand, each parameter gathered where it "
    "is read, random operations and batch statistics of each rank's own"
)


class Parts:
    """Makes the parts of a model callable, as long as nothing is captured.

    Args:
        compiler: of the model; it has the ranks, the precision, and says that parts were called.
        whole: the model's own call is no part's: it is the compiled one.
    """

    def __init__(self, compiler: Compiler, whole: bool) -> None:
        self._compiler = compiler
        self._model = compiler.model if whole else None
        self._made: dict[tuple, type] = {}
        self._classes = [(module, *self._classes_of(module)) for module in compiler.model.modules()]
        self._reads: list[list[tuple[torch.Tensor, int]]] = []  # of the calls that are running
        self._is_open = False
        self._open()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Modules have the classes that are captured; what changes them may change them for good."""
        if not self._is_open:
            yield
            return
        self._is_open = False
        for module, own, made in self._classes:
            if type(module) is made:  # else it was given another one meanwhile
                # At every step, and a module's way to do it is slow.
                object.__setattr__(module, "__class__", own)
        try:
            yield
        finally:
            self._open()

    def _open(self) -> None:
        for number, (module, own, made) in enumerate(self._classes):
            if type(module) is not own:
                own, made = self._classes_of(module)
                self._classes[number] = module, own, made
            object.__setattr__(module, "__class__", made)
        self._is_open = True

    def _classes_of(self, module: nn.Module) -> tuple[type, type]:
        """The class that a module has, and the one below it."""
        names = tuple(name for name, p in module._parameters.items() if p is not None)
        key = (type(module), names, module is self._model)
        if key not in self._made:
            self._made[key] = self._class_of(*key)
        return type(module), self._made[key]

    def _class_of(self, own: type, names: tuple[str, ...], whole: bool) -> type:
        """``whole``: the model itself, whose own call is the compiled one."""
        members: dict[str, Any] = {}
        for cls in reversed([c for c in own.__mro__ if c not in nn.Module.__mro__]):
            functions = (f for f in vars(cls).items() if isinstance(f[1], types.FunctionType))
            members |= {n: self._method(f) for n, f in functions if not n.startswith("__")}
        members["_apply"] = functools.partialmethod(_apply, own._apply)
        members["apply"] = self._with_own_classes(own.apply)
        if not whole:
            members["__call__"] = self._method(own.__call__, always=True)
        return class_that_reads(own, names, self._reader, members, _metaclass(type(own)))

    def _with_own_classes(self, function: Callable) -> Callable:
        """For ``apply``: what is applied may ask ``type(module) is nn.Linear``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.closed():
                return function(*args, **kwargs)

        return call

    def _method(self, function: Callable, always: bool = False) -> Callable:
        """A method during which parameters are whole: ``always``, or if it is given a tensor."""

        @functools.wraps(function)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            if not always and all(isinstance(x, DTensor) for x in given):
                with self._explained():
                    return function(module, *args, **kwargs)
            if not self._reads:
                self._compiler.state.check_filled()
                self._compiler.report([ON_THEIR_OWN])
                compute = self._compiler.settings.precision.compute
                if compute is not None:
                    args, kwargs = pytree.tree_map_only(
                        torch.Tensor, lambda x: in_dtype(x, compute), (args, kwargs)
                    )
            with self._running(), self._explained():
                return function(module, *args, **kwargs)

        return call

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._reads.append([])
        try:
            yield
        finally:
            read = self._reads.pop()
        if any(whole._version != version for whole, version in read):
            raise CaptureError(
                "code of the model writes into a parameter, of which it has a gathered copy",
                do="write from outside the model's methods, or in one that is given no tensor, into the "
                "parameter itself",
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if MIXED in str(error):
                raise CaptureError(
                    "code of the model reads a parameter in parts",
                    where=line_of(error),
                    why="parameters are gathered where modules, or methods that are given a tensor, read "
                    "them as attributes; parameters() and _parameters hold parts",
                    do="read the parameter as an attribute of its module, in a method that takes the input",
                ) from error
            compute = self._compiler.settings.precision.compute
            if (mixed := mixed_types_error(error, compute)) is not None:
                raise mixed from error
            raise

    def _reader(self, name: str) -> Callable[[nn.Module], torch.Tensor]:
        def read(module: nn.Module) -> torch.Tensor:
            if name not in module._parameters:
                raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
            parameter = module._parameters[name]
            # In a backward it is code under torch.utils.checkpoint that runs again.
            running = self._reads or dynamo.backward_now() is not None
            if not running or not isinstance(parameter, DTensor):
                return parameter  # type: ignore[return-value]
            whole = _Whole.apply(parameter, self._compiler)
            if self._reads:
                self._reads[-1].append((whole, whole._version))
            return whole

        return read


def _own_class(made: type) -> tuple:
    return operator.itemgetter(0), (made.__bases__,)


@functools.cache
def _metaclass(meta: type) -> type:
    """Of classes that are pickled, and so saved with a module, as the module's own."""
    made = type(meta.__name__, (meta,), {})
    copyreg.pickle(made, _own_class)  # type: ignore[arg-type]
    return made


def _apply(module: nn.Module, function: Callable, convert: Callable, recurse: bool = True):
    """``module.to(dtype)`` and its like: parameters stay the objects that they are, which torch would swap.

    (It cannot while there are weak references to one, and dynamo keeps some.)
    """
    named = module._parameters.items()
    own = {name: p for name, p in named if isinstance(p, DTensor)}
    module._parameters.update(dict.fromkeys(own))
    try:
        function(module, convert, recurse)
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for parameter in own.values():
            gradient, parameter.grad = parameter.grad, None
            dtensors.replace(parameter, convert(parameter))
            parameter.grad = None if gradient is None else convert(gradient)
    return module


class _Whole(torch.autograd.Function):
    """The whole of a parameter, in the type that the model computes in; the mean of its gradients."""

    @staticmethod
    def forward(ctx, parameter: DTensor, compiler: Compiler) -> torch.Tensor:
        ctx.compiler, ctx.dtype = compiler, parameter.dtype
        ctx.where = parameter.device_mesh, parameter.placements
        compute = compiler.settings.precision.compute
        whole = in_dtype(parameter, compute).full_tensor()  # type: ignore[attr-defined]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        precision, shape = ctx.compiler.settings.precision, ctx.compiler.ranks.shape
        mesh, placements = ctx.where
        own = gradient.to(precision.reduce or gradient.dtype) / shape.data_size
        pending = [Partial() if role.divides_batch else Replicate() for role in shape.roles]
        mean = DTensor.from_local(own, mesh, pending, run_check=False)
        return mean.redistribute(placements=placements).to(ctx.dtype), None
