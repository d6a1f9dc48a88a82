"""``stepgraph.register_operator``: operators of your own, in a compiled step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.errors import UsageError, near_misses
from stepgraph.operators import own
from stepgraph.torch_internals import custom_operators

# What computes an operator on the host; its kernel there, registered once, asks here.
_HOSTS: dict[Any, Callable[..., Any]] = {}


def register_operator(
    op: Any,
    *,
    sharding: str | Iterable[str] = (),
    cost: Callable[..., tuple[float, float]] | None = None,
    saves: Iterable[str | int] | None = None,
    host: Callable[..., Any] | None = None,
) -> None:
    """Says what a step needs to know of an operator that is not torch's.

    Without it such an operator runs whole on every rank, and the report says so. Registered again, an
    operator has the later facts alone. What its backward calls is an operator, too: register it as well.

    A sharding is written by names of dimensions: of each tensor argument in the schema's order, then of
    each result. Other arguments are not listed; an optional tensor that is never given is an empty group,
    at the end none::

        "rows _, _ -> rows _"                    # a norm of [rows, width] and a weight: by rows
        "rows (width), (width) -> rows (width)"  # the same; names in parentheses are for the reader
        "rows+ _, rows _, _ -> rows _, _"        # its backward: the weight's gradient sums over rows
        "rows width+, width out -> rows out"     # a product, in each of three ways

    Each plain name is a way to shard: what has the name is sharded along it, what lacks it is whole. If a
    result lacks it, an argument must have it with ``+``, and what ranks compute are parts of a sum;
    without ``+`` the name is no way to shard. ``_`` and ``(name)`` are never sharded. A name is one size.
    Of several texts the first that fits a call counts. That a way is right is the author's word:
    ``rows width, width -> rows width`` would shard a norm along what it normalises. (On a mesh where a step
    takes such a way, :func:`stepgraph.check` finds it.)

    Args:
        op: what ``torch.library.custom_op`` or ``torch.library.triton_op`` returned, or
            ``torch.ops.mine.norm.default``. It must not write into its arguments.
        sharding: one such text or several; none: as DTensor's rules have it, if they do.
        cost: called like the operator, with fake tensors of a rank's shapes; returns FLOPs and the bytes
            read and written. By default no FLOPs, and the bytes of arguments and results.
        saves: names or positions of the arguments that its backward needs. Checked and kept; no policy asks
            yet, since a captured backward tells by itself what it reads.
        host: computes it on host tensors, called like the operator: its kernel there, unless one was
            registered for that device itself, so that a step can be checked and run where the operator's
            device is not. It also says the shapes of results, if there is no fake implementation. Gradients
            do not come of it: that is ``torch.library.register_autograd``.

    Raises:
        UsageError: ``op`` is no such operator; a text or a name does not fit it. A text for tensors of
            other dimensions is found when a step is placed.
    """
    target = _operator(op)
    texts = (sharding,) if isinstance(sharding, str) else tuple(sharding)
    known = own.OwnOperator(
        target, own.shardings_of(target, texts), cost, _positions(target, saves or ())
    )
    if host is not None:
        _use_on_host(target, host)
    own.REGISTERED[target] = known


def _operator(op: Any) -> Any:
    if custom_operators.is_triton_kernel(op):
        raise UsageError(
            f"{getattr(op, '__name__', op)} is a Triton kernel, which says nothing of its results",
            do="wrap the function that launches it with torch.library.triton_op, and register that",
        )
    target = custom_operators.overload_of(op)
    if target is None:
        raise UsageError(
            f"{op!r} is not one operator",
            do="give what torch.library.custom_op returned, or torch.ops.NAMESPACE.NAME.OVERLOAD",
        )
    if not own.is_own(target):
        raise UsageError(f"{target} is torch's own, and known already", do="leave it out")
    if target._schema.is_mutable:
        raise UsageError(
            f"{target} writes into its arguments, and a step is a functional program",
            do="make an operator that returns new tensors (mutates_args=())",
        )
    return target


def _positions(target: Any, saves: Iterable[str | int]) -> tuple[int, ...]:
    names = [argument.name for argument in target._schema.arguments]
    found = []
    for saved in saves:
        position = names.index(saved) if saved in names else saved
        if not isinstance(position, int) or not 0 <= position < len(names):
            raise UsageError(
                f"{target} has no argument {saved!r} to save", do=near_misses(str(saved), names)
            )
        found.append(position)
    return tuple(found)


def _use_on_host(target: Any, host: Callable[..., Any]) -> None:
    def compute(*args: Any, **kwargs: Any) -> Any:
        return _HOSTS[target](*args, **kwargs)

    device_type = torch_internals.host_device().type
    if target not in _HOSTS and not custom_operators.has_kernel(target, device_type.upper()):
        torch.library.register_kernel(target, device_type, compute)
    if not custom_operators.has_fake(target):
        torch.library.register_fake(target, compute)
    _HOSTS[target] = host
