"""The optimizer's states, as the programs hold them and as ``optimizer.state`` shows them.

The programs keep one padded local tensor for each state, and one number for a whole parameter group
where torch keeps a copy for every parameter. ``optimizer.state`` is torch's own table: it is filled
when somebody asks for a state dict, and read after somebody loaded one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stepgraph.capture.optimizer import FIRST_STEP
from stepgraph.errors import CheckpointError
from stepgraph.program import roles
from stepgraph.program.layout import local_shape
from stepgraph.program.program import Value
from stepgraph.program.shards import local_part

if TYPE_CHECKING:
    from stepgraph.runtime.state import State


def first_value(state: State, owner: str, key: str, value: Value) -> torch.Tensor:
    """A state's first (padded, local) value: what the optimizer holds already, or its starting value."""
    assert state.functional is not None and state.optimizer is not None
    for name, group in state.functional.group_of.items():
        if owner not in (name, f"group{group}"):
            continue
        parameter = state.model.get_parameter(name)
        table = state.optimizer.state.get(parameter, {})
        if key == FIRST_STEP:  # states that somebody loaded or made come from an earlier step
            stepped = any(isinstance(held, torch.Tensor) for held in table.values())
            return _filled(state, value, 0.0 if stepped else 1.0)
        if not isinstance(held := table.get(key), torch.Tensor):
            fill = state.functional.rule(name, parameter).states[key].fill
            return _filled(state, value, fill or 0.0)
        local = _filled(state, value, 0.0)
        _copy_into(state, local, value, held)
        if value.shape:  # what was loaded need not be kept twice
            table[key] = state.as_dtensor(local, value)
        return local
    raise AssertionError(f"optimizer state {owner}:{key} has no owner")


def publish(state: State) -> None:
    """Fills ``optimizer.state`` with copies of what the programs hold."""
    if state.optimizer is None or state.functional is None:
        return
    for name, group in state.functional.group_of.items():
        parameter = state.model.get_parameter(name)
        if _is_fresh(state, name, group):
            state.optimizer.state.pop(parameter, None)
            continue
        table = state.optimizer.state[parameter]
        for key, role in states_of(state, name, group).items():
            # A number shared by a group becomes one per parameter, as torch keeps it.
            local, value = state.tensors[role].clone(), state.values[role]
            table[key] = state.as_dtensor(local, value) if value.shape else local


def current(state: State) -> dict[str, dict[str, torch.Tensor]]:
    """The states by the parameter's name, as DTensors that view what the programs hold.

    Where no program holds them yet, they are what ``optimizer.state`` has.
    """
    assert state.optimizer is not None
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in state.model.named_parameters():
        group = state.functional.group_of.get(name) if state.functional is not None else None
        if group is None:
            table = state.optimizer.state.get(parameter, {})
            found[name] = {k: v for k, v in table.items() if isinstance(v, torch.Tensor)}
        elif not _is_fresh(state, name, group):
            found[name] = {
                key: state.as_dtensor(state.tensors[role], state.values[role])
                if state.values[role].shape
                else state.tensors[role]
                for key, role in states_of(state, name, group).items()
            }
    return {name: table for name, table in found.items() if table}


def _is_fresh(state: State, name: str, group: int) -> bool:
    """Whether no step has defined a parameter's states yet: torch holds none then."""
    first = state.tensors.get(role_of(state, name, group, FIRST_STEP))
    return first is not None and float(first) > 0


def adopt(state: State) -> None:
    """Takes over what was loaded into ``optimizer.state``; a parameter without states starts afresh.

    Raises:
        CheckpointError: numbers that the programs keep once for a group differ between its parameters.
    """
    if state.optimizer is None or state.functional is None:
        return
    optimizer = state.optimizer
    check_loaded(state, lambda name: optimizer.state.get(state.model.get_parameter(name), {}))
    for name, group in state.functional.group_of.items():
        parameter = state.model.get_parameter(name)
        table = state.optimizer.state.get(parameter, {})
        loaded = {key: held for key, held in table.items() if isinstance(held, torch.Tensor)}
        specs = state.functional.rule(name, parameter).states
        for key, role in states_of(state, name, group).items():
            if key in loaded:
                _copy_into(state, state.tensors[role], state.values[role], loaded[key])
            else:
                state.tensors[role].fill_(specs[key].fill or 0.0)
        if (first := role_of(state, name, group, FIRST_STEP)) in state.tensors:
            state.tensors[first].fill_(0.0 if loaded else 1.0)


def check_loaded(state: State, table_of: Callable[[str], Mapping[str, Any]]) -> None:
    """Refuses loaded states that the compiled programs have no place for.

    Args:
        table_of: the loaded states by parameter name.

    Raises:
        CheckpointError: a number that is kept once for a group differs between its parameters, or a
            state is missing that only the optimizer's constructor makes.
    """
    assert state.functional is not None
    seen: dict[roles.OptimizerState, tuple[str, float]] = {}
    for name, group in state.functional.group_of.items():
        table = {k: v for k, v in table_of(name).items() if isinstance(v, torch.Tensor)}
        specs = state.functional.rule(name, state.model.get_parameter(name)).states
        places = states_of(state, name, group)
        for key in places:
            if key not in table and specs[key].fill is None and FIRST_STEP not in specs:
                raise CheckpointError(
                    f"nothing was loaded for {key!r} of {name!r}, which the optimizer makes with its "
                    "parameters and not in a step",
                    do="load a state that has it, or into a new Engine",
                )
        numbers = {
            role: float(table.get(k, 0.0)) for k, role in places.items() if role.owner != name
        }
        first = role_of(state, name, group, FIRST_STEP)
        if first in state.tensors and first.owner != name:
            numbers[first] = 0.0 if table else 1.0
        for role, number in numbers.items():
            other, expected = seen.setdefault(role, (name, number))
            if number != expected:
                raise CheckpointError(
                    f"{role.key!r} is {expected:g} for {other!r} and {number:g} for {name!r}, which "
                    f"are in one parameter group (number {group})",
                    why="the compiled step keeps it once for the group",
                    do="load before the first step, or build the groups as they were saved",
                )


def states_of(state: State, name: str, group: int) -> dict[str, roles.OptimizerState]:
    """The states of a parameter that the programs hold, under torch's keys."""
    assert state.functional is not None
    keys = state.functional.rule(name, state.model.get_parameter(name)).states
    found = {key: role_of(state, name, group, key) for key in keys if key != FIRST_STEP}
    return {key: role for key, role in found.items() if role in state.tensors}


def role_of(state: State, name: str, group: int, key: str) -> roles.OptimizerState:
    """Where the programs keep a state: for the whole group, or for the parameter."""
    shared = roles.OptimizerState(f"group{group}", key)
    return shared if shared in state.tensors else roles.OptimizerState(name, key)


def _filled(state: State, value: Value, fill: float) -> torch.Tensor:
    assert value.placements is not None
    shape = local_shape(value.shape, value.placements, state.ranks.shape)
    return torch.full(shape, fill, dtype=value.dtype, device=state.device)


def _copy_into(state: State, local: torch.Tensor, value: Value, loaded: torch.Tensor) -> None:
    """Copies a whole or distributed tensor into a padded local one."""
    assert value.placements is not None
    loaded = loaded.detach()
    if isinstance(loaded, DTensor) and _memory(loaded.to_local()) == _memory(local):
        return  # it was loaded into its place
    mine = state.as_dtensor(local, value)
    if isinstance(loaded, DTensor) and (
        (loaded.device_mesh, loaded.placements) == (mine.device_mesh, mine.placements)
    ):
        mine.to_local().copy_(loaded.to_local())
        return
    whole = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
    local.copy_(local_part(whole, value.placements, state.ranks.shape, state.ranks.rank))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
