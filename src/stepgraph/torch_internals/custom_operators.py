"""Operators made with ``torch.library``: what torch has of them, and what it says that they lack."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import config as _functorch_config
from torch._library import custom_ops, simple_registry
from torch._ops import OpOverload, OpOverloadPacket


def overload_of(op: Any) -> OpOverload | None:
    """The one overload that an object of ``torch.library`` or ``torch.ops`` stands for, if it does."""
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        return getattr(op, names[0]) if len(names) == 1 else None
    if isinstance(op, custom_ops.CustomOpDef):
        return op._opoverload
    return op if isinstance(op, OpOverload) else None


def is_triton_kernel(op: Any) -> bool:
    """Whether an object is a kernel of Triton itself (jitted, autotuned), no operator."""
    return type(op).__module__.split(".")[0] == "triton"


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of its own under a dispatch key, such as that of the host."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def has_fake(op: OpOverload) -> bool:
    """Whether torch can tell an operator's results from fake arguments."""
    definition = custom_ops._maybe_get_opdef(op)
    if definition is not None:
        return definition._abstract_fn is not None
    registered = simple_registry.singleton.find(op.name()).fake_impl.kernel is not None
    return registered or has_kernel(op, "Meta") or has_kernel(op, "CompositeImplicitAutograd")


def functionalize(name: str) -> None:
    """Lets AOTAutograd trace an operator that hands its argument on, which torch refuses to.

    Args:
        name: of one that takes tensors; nobody writes into what it gives.
    """

    def traced(*wrapped: torch.Tensor) -> torch.Tensor:
        for x in wrapped:
            torch._sync(x)  # type: ignore[attr-defined]
        inner = map(torch._from_functional_tensor, wrapped)  # type: ignore[attr-defined]
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(key):
            found = operator(*inner)
        return torch._to_functional_tensor(found)  # type: ignore[attr-defined]

    namespace, _, short = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), short)
    torch.library.impl(name, "Functionalize")(traced)


@contextlib.contextmanager
def keeping_triton_operators() -> Iterator[None]:
    """An operator of ``torch.library.triton_op`` stays one operator, as in ``torch.export``."""
    with _functorch_config.patch(decompose_custom_triton_ops=False):
        yield


_NO_FAKE = re.compile(
    r"no fake impl registered for <CustomOpDef\((?P<definition>[^)]+)\)>"
    r"|unsupported operator: (?P<overload>[\w.:]+)"
)
# Where an operator was made with ``Library.define`` alone, torch only warns.
NO_FORMULA_WARNING = r"[\w:]+: an autograd kernel was not registered"
_NO_FORMULA = re.compile(
    r"backward through (?P<overload>[\w.:]+) but no autograd formula"
    r"|(?P<definition>[\w:]+): an autograd kernel was not registered"
)


def lacks(error: BaseException) -> tuple[str, str]:
    """(operator, ``fake`` or ``formula``) where an error says that an operator lacks it; else empty."""
    text = str(error)
    for pattern, lacking in ((_NO_FORMULA, "formula"), (_NO_FAKE, "fake")):
        if match := pattern.search(text):
            return (match["definition"] or match["overload"]).replace("::", "."), lacking
    return "", ""
