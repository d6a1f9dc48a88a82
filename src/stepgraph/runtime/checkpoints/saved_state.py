"""What a checkpoint holds, as one nested dict under names that plain PyTorch knows.

``model`` is the module's own state dict, and ``optimizer`` has the layout of
``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``: states and parameter groups
under the parameters' names. So plain PyTorch loads it with ``dcp.load`` and ``set_state_dict``, on any
sharding of its own. Beside them: ``buffers`` outside the state dict, and ``extra``.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from stepgraph.errors import CheckpointError, name_a_few
from stepgraph.program.layout import replicated
from stepgraph.program.program import Value
from stepgraph.runtime import optimizer_state as states
from stepgraph.runtime.state import State

log = logging.getLogger("stepgraph")

_INDEXED = 3  # as long as the longest prefix asked for: optimizer, state, name
_EXTRA_STATE = "_extra_state"  # documented by nn.Module.get_extra_state
# They choose an implementation, which is this run's own business.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def model_state(state: State) -> dict[str, Any]:
    """``model`` and ``buffers``: DTensors that view the storage."""
    own = state.state_dict()
    buffers = {
        name: state.whole_dtensor(buffer)
        for name, buffer in state.model.named_buffers()
        if name not in own
    }
    return {"model": own, "buffers": buffers}


def optimizer_state(state: State) -> dict[str, Any]:
    """``state`` and ``param_groups`` under the parameters' names; tensors view the storage."""
    assert state.optimizer is not None
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    held = states.current(state)
    groups = []
    for group in state.optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [names[id(tensor)] for tensor in group["params"]], **settings})
    return {"state": held, "param_groups": groups}


class SavedState:
    """Reads a verified checkpoint's tensors and values; of each tensor this rank reads its own part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._below: dict[tuple, dict[tuple, str]] = {}
        for key, path in self._metadata.planner_data.items():
            for length in range(min(len(path), _INDEXED) + 1):
                below = self._below.setdefault(tuple(path[:length]), {})
                below[tuple(path[length:])] = key

    def below(self, *prefix: str) -> dict[tuple, str]:
        """The rest of the path, and the key in the files, of everything that was saved below a path.

        The rest of a path that leads to a value is ``()``. At most three steps are looked up.
        """
        return self._below.get(prefix, {})

    def shape(self, key: str) -> tuple[int, ...] | None:
        """A tensor's global shape; None for a plain value."""
        entry = self._metadata.state_dict_metadata[key]
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def dtype(self, key: str) -> torch.dtype:
        """A tensor's type."""
        return self._metadata.state_dict_metadata[key].properties.dtype

    def read_into(self, targets: dict[str, Any]) -> None:
        """Fills tensors in place; for plain values the entry of ``targets`` is replaced."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, False)
        self._reader.set_up_storage_reader(self._metadata, False)
        plan = planner.create_local_plan()
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def read_tree(self, *prefix: str) -> Any:
        """Everything below a path, whole tensors included; None where there is nothing."""
        keys = self.below(*prefix)
        values: dict[str, Any] = {}
        for key in keys.values():
            shape = self.shape(key)
            values[key] = None if shape is None else torch.empty(shape, dtype=self.dtype(key))
        self.read_into(values)
        return _tree({path: values[key] for path, key in keys.items()})


def _tree(leaves: dict[tuple, Any]) -> Any:
    """A nest of dicts and lists from its leaves by path; positions in lists are whole numbers."""
    if not leaves:
        return None
    if () in leaves:
        return leaves[()]
    parts: dict[Any, dict[tuple, Any]] = {}
    for path, value in leaves.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    found = {first: _tree(rest) for first, rest in parts.items()}
    if all(isinstance(first, int) for first in found):
        return [found[index] for index in sorted(found)]
    return found


# -- the model


def check_model(state: State, saved: SavedState) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        CheckpointError: names what is missing, unknown or of another shape.
    """
    own = state.state_dict()
    held = {path[0] for path in saved.below("model")}
    missing, unknown = [k for k in own if k not in held], [k for k in held if k not in own]
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint {saved.folder} is of another model: it lacks {_named(missing)}; "
            f"the model has no {_named(unknown)}",
            do="load it into the model that was saved",
        )
    casts = []
    for (name, *rest), key in saved.below("model").items():
        shape = saved.shape(key)
        if rest or not isinstance(own[name], torch.Tensor) or shape is None:
            continue
        if shape != tuple(own[name].shape):
            raise CheckpointError(
                f"{name!r} has shape {list(shape)} in the checkpoint {saved.folder} and "
                f"{list(own[name].shape)} in the model",
                do="load it into the model that was saved",
            )
        if saved.dtype(key) != own[name].dtype:
            casts.append(name)
    if casts:
        log.warning("cast on loading, saved in another type: %s", name_a_few(sorted(casts)))


def load_model(state: State, saved: SavedState) -> None:
    """Fills the model's parameters and buffers in place."""
    own = state.state_dict()
    targets = {
        saved.below("model", name)[()]: value
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    buffers, filled, skipped = dict(state.model.named_buffers()), set(own), []
    for (name,), key in saved.below("buffers").items():
        if name in buffers and saved.shape(key) == tuple(buffers[name].shape):
            targets[key] = state.whole_dtensor(buffers[name])
            filled.add(name)
        else:
            skipped.append(name)
    if skipped:
        log.warning(
            "buffers that the model has not, or not like this: %s", name_a_few(sorted(skipped))
        )
    saved.read_into(targets)
    for name in (name for name in own if name.endswith(_EXTRA_STATE)):
        module = state.model.get_submodule(name.removesuffix(_EXTRA_STATE).removesuffix("."))
        module.set_extra_state(saved.read_tree("model", name))
    for name in filled:
        state.unfilled.pop(name, None)


# -- the optimizer


def load_optimizer(state: State, saved: SavedState) -> None:
    """Fills the optimizer's states and the numbers of its groups, by the parameters' names.

    A parameter that has none in the checkpoint starts afresh.

    Raises:
        CheckpointError: states that do not fit, before anything is changed.
    """
    optimizer = state.optimizer
    assert optimizer is not None
    tables: dict[str, dict[str, Any]] = {}
    small: dict[str, torch.Tensor] = {}
    large: dict[str, torch.Tensor] = {}
    for name, parameter in state.model.named_parameters():
        if not any(tensor is parameter for g in optimizer.param_groups for tensor in g["params"]):
            continue
        for (state_key, *_), key in saved.below("optimizer", "state", name).items():
            target = _target(state, name, parameter, state_key, saved, key)
            (large if target.dim() else small)[key] = target
            tables.setdefault(name, {})[state_key] = target
    saved.read_into(small)
    if state.functional is not None:
        states.check_loaded(state, tables)
    groups = saved.read_tree("optimizer", "param_groups")
    saved.read_into(large)
    for name, parameter in state.model.named_parameters():
        if name in tables:
            optimizer.state[parameter] = tables[name]
        else:
            optimizer.state.pop(parameter, None)
    states.adopt(state)
    _load_groups(state, groups)


def _target(
    state: State, name: str, parameter: nn.Parameter, state_key: str, saved: SavedState, key: str
) -> torch.Tensor:
    """Where a state is read to: the storage of the programs, if there is one, else new memory."""
    shape, dtype = saved.shape(key), saved.dtype(key)
    assert shape is not None and isinstance(parameter, DTensor)
    value = Value(shape, dtype, tuple(parameter.placements))
    if state.functional is not None and name in state.functional.group_of:
        roles = states.states_of(state, name)
        if state_key not in roles or state.values[roles[state_key]].shape != shape:
            raise CheckpointError(
                f"the checkpoint {saved.folder} holds {state_key!r} {list(shape)} for {name!r}, "
                f"which this optimizer does not keep (it keeps {', '.join(sorted(roles))})",
                do="use the optimizer that was saved, with the same options",
            )
        if shape:
            role = roles[state_key]
            return state.as_dtensor(state.settled(role), state.values[role])
    elif shape != tuple(parameter.shape):
        value = Value(shape, dtype, replicated(state.ranks.shape))
    if not shape:
        return torch.zeros((), dtype=dtype, device=state.device)
    return state.as_dtensor(state.filled(value), value)


def _load_groups(state: State, saved_groups: list[dict[str, Any]]) -> None:
    """Sets the numbers of each parameter group to what was saved for its parameters.

    Where one group now holds parameters of several saved groups, a number on which those agree is
    taken; one on which they do not stays as it is, and that is said.
    """
    assert state.optimizer is not None
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    saved_as = {name: group for group in saved_groups for name in group["params"]}
    for index, group in enumerate(state.optimizer.param_groups):
        sources: list[dict[str, Any]] = []
        for tensor in group["params"]:
            source = saved_as.get(names[id(tensor)])
            if source is not None and not any(source is other for other in sources):
                sources.append(source)
        kept = []
        for key in dict.fromkeys(key for source in sources for key in source):
            if key == "params" or key in _IMPLEMENTATION:
                continue
            values = [source.get(key) for source in sources]
            if any(value != values[0] for value in values):
                kept.append(key)
            elif isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(values[0]))
            else:
                value = values[0]
                group[key] = value.item() if isinstance(value, torch.Tensor) else value
        if kept:
            log.warning(
                "parameter group %d joins groups that were saved apart and keeps its own %s",
                index, ", ".join(kept),
            )  # fmt: skip


def _named(names: list[str]) -> str:
    return name_a_few([repr(name) for name in sorted(names)]) or "nothing"
