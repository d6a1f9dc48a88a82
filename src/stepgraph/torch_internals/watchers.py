"""Those who watch what torch runs: dispatch modes, and hooks of torch's own on all modules."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.modules.module as _modules
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within it nobody watches: capturing a step is not running it, and dynamo does not go into such hooks.

    A counter of FLOPs around a first step counts the step. On fake tensors all stays as it is.
    """
    watched = is_in_torch_dispatch_mode(include_infra_modes=False)
    apart = watched and torch._C._get_dispatch_mode(_FAKE) is None
    with _disable_current_modes() if apart else contextlib.nullcontext(), _without_torchs_hooks():
        yield


def hooks_on_all_modules() -> list[dict[int, Any]]:
    """By their numbers: two tables of those around forwards, two of those around backwards."""
    return [
        _modules._global_forward_hooks,
        _modules._global_forward_pre_hooks,
        _modules._global_backward_hooks,
        _modules._global_backward_pre_hooks,
    ]


def of_users() -> tuple[tuple[int, ...], bool]:
    """The numbers of hooks around all forwards, and whether there are any on all backwards.

    Torch's own, which watch, do not count.
    """
    after, before, *backward = (
        [number for number, hook in table.items() if not _is_torchs(hook)]
        for table in hooks_on_all_modules()
    )
    return (*after, *before), any(backward)


@contextlib.contextmanager
def _without_torchs_hooks() -> Iterator[None]:
    before = [(table, dict(table)) for table in hooks_on_all_modules()]
    for table, hooks in before:
        for number, hook in hooks.items():
            if _is_torchs(hook):
                del table[number]
    try:
        yield
    finally:
        for table, hooks in before:
            if len(table) != len(hooks):
                table.clear()
                table.update(hooks)


def _is_torchs(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")
