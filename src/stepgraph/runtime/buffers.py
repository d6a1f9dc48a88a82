"""A model's buffers, which code may put others in the place of."""

from collections import Counter

import torch
from torch import nn

from stepgraph.errors import UsageError, name_a_few


class PlacesOfBuffers:
    """Where a model has its buffers: modules, their names there, and what stood there at first.

    Programs take those that it had when they were made.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{leaf}" if path else leaf, module, leaf, buffer)
            for path, module in model.named_modules()
            for leaf, buffer in module._buffers.items()
        ]
        count = Counter(id(buffer) for *_, buffer in self._places if buffer is not None)
        self._shared = {key for key, places in count.items() if places > 1}

    def adopt(self) -> dict[str, torch.Tensor]:
        """Copies a buffer that was put in another's place into that one, and puts that back.

        Returns:
            those that stay in the other's place, by name: they are of another type.

        Raises:
            UsageError: it has another shape, there was none or is none now, or modules share it.
        """
        converted = {}
        for index, (name, module, leaf, own) in enumerate(self._places):
            buffer = module._buffers.get(leaf)
            if buffer is own:
                continue
            shared = id(own) in self._shared
            if buffer is None or own is None or shared or buffer.shape != own.shape:
                raise UsageError(
                    f"buffer {name!r} was replaced by {_shown(buffer)}, and programs take {_shown(own)}"
                    + (", which modules share" if shared else ""),
                    do="give the model its buffers before the engine is made",
                )
            if (buffer.dtype, buffer.device) != (own.dtype, own.device):
                self._places[index] = (name, module, leaf, buffer)
                converted[name] = buffer
                continue
            with torch.no_grad():
                own.copy_(buffer)
            module._buffers[leaf] = own
        return converted

    def check(self, model: nn.Module) -> None:
        """Refuses a model whose modules with buffers are others, or elsewhere.

        Raises:
            UsageError: it names buffers.
        """
        now = {
            (f"{path}.{leaf}" if path else leaf): module
            for path, module in model.named_modules(remove_duplicate=False)
            for leaf in module._buffers
        }
        held = {name: module for name, module, *_ in self._places}
        known = set(map(id, held.values()))
        changed = [name for name, module in held.items() if now.get(name) is not module]
        changed += [name for name, module in now.items() if id(module) not in known]
        if changed:
            raise UsageError(
                f"modules with buffers were moved, replaced, added or removed since the model was given: "
                f"{name_a_few(list(dict.fromkeys(changed)))}",
                why="programs take buffers by name, from where they were when the engine was made",
                do="change the model before",
            )


def _shown(buffer: torch.Tensor | None) -> str:
    return "none" if buffer is None else f"{list(buffer.shape)} {buffer.dtype}"
