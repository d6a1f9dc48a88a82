"""The optimizer's states, as the programs hold them and as ``optimizer.state`` shows them.

The programs keep one padded local tensor for each state, and one number for a whole parameter group
where torch keeps a copy for every parameter. ``optimizer.state`` is torch's own table: it is filled
when somebody asks for a state dict, and read after somebody loaded one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    check_shared_numbers(state, lambda name: state.optimizer.state.get(_parameter(state, name), {}))
    for name, group in state.functional.group_of.items():
        parameter = state.model.get_parameter(name)
        table = state.optimizer.state.get(parameter, {})
        loaded = {key: held for key, held in table.items() if isinstance(held, torch.Tensor)}
        specs = state.functional.rule(name, parameter).states
        for key, role in states_of(state, name, group).items():
            if key in loaded:
                _copy_into(state, state.tensors[role], state.values[role], loaded[key])
            elif (fill := specs[key].fill) is not None or FIRST_STEP in specs:
                state.tensors[role].fill_(fill or 0.0)
            else:
                raise CheckpointError(
                    f"there is nothing loaded for {key!r} of {name!r}, and the compiled step "
                    "cannot start it afresh",
                    why="it was compiled for an optimizer that had taken steps already",
                    do="load into a new Engine",
                )
        if (first := role_of(state, name, group, FIRST_STEP)) in state.tensors:
            state.tensors[first].fill_(0.0 if loaded else 1.0)


def check_shared_numbers(state: State, table_of) -> None:
    """Refuses numbers that the programs keep once for a group and that differ between its parameters.

    Args:
        table_of: the loaded states by parameter name.
    """
    assert state.functional is not None
    seen: dict[roles.OptimizerState, tuple[str, float]] = {}
    for name, group in state.functional.group_of.items():
        table = table_of(name)
        for key, role in states_of(state, name, group).items():
            if role.owner == name:
                continue
            number = float(table[key]) if isinstance(table.get(key), torch.Tensor) else 0.0
            other, expected = seen.setdefault(role, (name, number))
            if number != expected:
                raise CheckpointError(
                    f"{key!r} is {expected:g} for {other!r} and {number:g} for {name!r}, which "
                    f"are in one parameter group (number {group})",
                    why="the compiled step keeps it once for the group",
                    do="load before the first step, or build the groups as they were saved",
                )


def states_of(state: State, name: str, group: int) -> dict[str, roles.OptimizerState]:
    """The states of a parameter that the programs hold, under torch's keys."""
    assert state.functional is not None
    keys = state.functional.rule(name, _parameter(state, name)).states
    found = {key: role_of(state, name, group, key) for key in keys if key != FIRST_STEP}
    return {key: role for key, role in found.items() if role in state.tensors}


def role_of(state: State, name: str, group: int, key: str) -> roles.OptimizerState:
    """Where the programs keep a state: for the whole group, or for the parameter."""
    shared = roles.OptimizerState(f"group{group}", key)
    return shared if shared in state.tensors else roles.OptimizerState(name, key)


def _parameter(state: State, name: str) -> torch.nn.Parameter:
    return state.model.get_parameter(name)


def _filled(state: State, value: Value, fill: float) -> torch.Tensor:
    assert value.placements is not None
    shape = local_shape(value.shape, value.placements, state.ranks.shape)
    return torch.full(shape, fill, dtype=value.dtype, device=state.device)


def _copy_into(state: State, local: torch.Tensor, value: Value, loaded: torch.Tensor) -> None:
    """Copies a whole or distributed tensor into a padded local one."""
    assert value.placements is not None
    loaded = loaded.detach()
    mine = state.as_dtensor(local, value)
    if isinstance(loaded, DTensor) and (
        (loaded.device_mesh, loaded.placements) == (mine.device_mesh, mine.placements)
    ):
        mine.to_local().copy_(loaded.to_local())
        return
    whole = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
    local.copy_(local_part(whole, value.placements, state.ranks.shape, state.ranks.rank))
