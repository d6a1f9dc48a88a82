"""The optimizer's states and numbers, as the programs hold them and as the optimizer shows them.

The programs keep one padded local tensor for each state, and one number for parameters that are always
updated together where torch keeps a copy for each. ``optimizer.state`` is torch's own table: it is filled
when somebody asks for a state dict, and read after somebody loaded one.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stepgraph import torch_internals
from stepgraph.capture import optimizer as capture
from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.update_rules import FIRST_STEP, FunctionalOptimizer
from stepgraph.errors import CheckpointError, FrozenNumberError, UsageError
from stepgraph.program import roles
from stepgraph.program.layout import Placements, local_shape
from stepgraph.program.program import Value
from stepgraph.program.shards import local_part, rows_held
from stepgraph.runtime.ranks import Ranks
from stepgraph.torch_internals import dtensors


class Stored:
    """Tensors as this rank stores them, padded to equal shards: what programs take, by role."""

    counters: SharedCounters

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.model, self.optimizer, self.ranks, self.device = model, optimizer, ranks, device
        self.functional: FunctionalOptimizer | None = None
        self.tensors: dict[roles.Input, torch.Tensor] = {}
        self.values: dict[roles.Input, Value] = {}
        self._taken: set[roles.Input] = set()  # by programs, from where they are

    def filled(self, value: Value, fill: float = 0.0) -> torch.Tensor:
        """A local (padded) tensor of a value, with one number everywhere."""
        assert value.placements is not None
        shape = local_shape(value.shape, value.placements, self.ranks.shape)
        return torch.full(shape, fill, dtype=value.dtype, device=self.device)

    def part_of(self, tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
        """This rank's (padded) part of a whole or distributed tensor."""
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return local_part(whole, placements, self.ranks.shape, self.ranks.rank)

    def hold(self, role: roles.Input, tensor: torch.Tensor, on_host: bool) -> None:
        """Holds a tensor where a program takes it from.

        Args:
            on_host: by way of a copy from the host's memory; pinned, where that is not the device's.

        Raises:
            UsageError: another program takes it from elsewhere.
        """
        host = torch_internals.host_device()
        on_host &= self.device.type != host.type
        where = host if on_host else self.device
        if role in self._taken and tensor.device.type != where.type:
            raise UsageError(
                f"{roles.label(role)} waits on the host for one way to run the step, and not for another",
                do="keep to one of them (engine.step; backward and optimizer.step), or say "
                "memory={'optimizer': 'offload'}, which holds for both",
            )
        self._taken.add(role)
        tensor = tensor.to(where)
        self.tensors[role] = tensor.pin_memory() if on_host and not tensor.is_pinned() else tensor
        if on_host:
            self.show(role)

    def show(self, role: roles.Input) -> None:
        """What ``optimizer.state`` has of a state is what is stored: it need not be kept twice."""
        if self.optimizer is None or not isinstance(role, roles.OptimizerState):
            return
        name = self.counters.members(role.owner)[0]
        table = self.optimizer.state.get(self.model.get_parameter(name), {})
        if isinstance(table.get(role.key), torch.Tensor):
            table[role.key] = self.as_dtensor(self.tensors[role], self.values[role])

    def forget_programs(self) -> None:
        """No program takes anything any more: the next may want it elsewhere."""
        self._taken.clear()

    def settled(self, role: roles.Input) -> torch.Tensor:
        """What is stored; of what waits on the host, once copies to there have arrived."""
        if (held := self.tensors[role]).device.type != self.device.type:
            torch.get_device_module(self.device).synchronize()
        return held

    def as_dtensor(self, local: torch.Tensor, value: Value) -> DTensor:
        """A DTensor that views the unpadded part of a local tensor."""
        assert value.placements is not None
        sizes, coordinate = self.ranks.shape.sizes, self.ranks.shape.coordinate(self.ranks.rank)
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Shard):
                held = rows_held(value.shape[placement.dim], sizes[axis], coordinate[axis])
                local = local.narrow(placement.dim, 0, min(held, local.shape[placement.dim]))
        mesh, whole = self.ranks.device_mesh, torch.empty(value.shape, device="meta")
        if local.device.type != self.device.type:
            return dtensors.made_of(local, mesh, value.placements, whole)
        form = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(local, mesh, value.placements, run_check=False, **form)


def first_value(state: Stored, owner: str, key: str, value: Value) -> torch.Tensor:
    """A state's first (padded, local) value: what the optimizer holds already, or its starting value."""
    assert state.functional is not None and state.optimizer is not None
    name = state.counters.members(owner)[0]
    parameter = state.model.get_parameter(name)
    table = state.optimizer.state.get(parameter, {})
    if key == FIRST_STEP:  # states that somebody loaded or made come from an earlier step
        stepped = any(isinstance(held, torch.Tensor) for held in table.values())
        return state.filled(value, 0.0 if stepped else 1.0)
    if not isinstance(held := table.get(key), torch.Tensor):
        fill = state.functional.rule(name, parameter).states[key].fill
        return state.filled(value, fill or 0.0)
    local = state.filled(value)
    _copy_into(state, local, value, held)
    if value.shape:  # what was loaded need not be kept twice
        table[key] = state.as_dtensor(local, value)
    return local


def place(state: Stored, role: roles.Input, held: Value) -> None:
    """Stores a state as a program wants it, where it is stored otherwise; an accumulator is forgotten.

    Args:
        held: where it is now; ``state.values`` says where it is wanted.
    """
    if isinstance(role, roles.Accumulator):
        state.tensors.pop(role, None)
    if not isinstance(role, roles.OptimizerState) or role not in state.tensors:
        return
    value = state.values[role]
    assert value.placements is not None and state.optimizer is not None
    whole = state.as_dtensor(state.settled(role).to(state.device), held)
    local = state.tensors[role] = state.part_of(whole, value.placements).clone()
    table = state.optimizer.state.get(state.model.get_parameter(role.owner), {})
    if role.key in table:  # copies that somebody asked for, or what was loaded
        table[role.key] = state.as_dtensor(local, value)


def publish(state: Stored) -> None:
    """Fills ``optimizer.state`` with copies of what the programs hold."""
    if state.optimizer is None or state.functional is None:
        return
    for name in state.functional.group_of:
        parameter, states = state.model.get_parameter(name), states_of(state, name)
        if not states or _is_fresh(state, name):
            state.optimizer.state.pop(parameter, None)
            continue
        table = state.optimizer.state[parameter]
        for key, role in states.items():
            # A number that several share becomes one per parameter, as torch keeps it.
            local, value = state.settled(role).clone(), state.values[role]
            table[key] = state.as_dtensor(local, value) if value.shape else local


def current(state: Stored) -> dict[str, dict[str, torch.Tensor]]:
    """The states by the parameter's name, as DTensors that view what the programs hold.

    Where no program holds them yet, they are what ``optimizer.state`` has.
    """
    assert state.optimizer is not None
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in state.model.named_parameters():
        if state.functional is None or name not in state.functional.group_of:
            table = state.optimizer.state.get(parameter, {})
            found[name] = {k: v for k, v in table.items() if isinstance(v, torch.Tensor)}
        elif not _is_fresh(state, name):
            found[name] = {
                key: state.as_dtensor(state.settled(role), state.values[role])
                if state.values[role].shape
                else state.tensors[role]
                for key, role in states_of(state, name).items()
            }
    return {name: table for name, table in found.items() if table}


def _is_fresh(state: Stored, name: str) -> bool:
    """Whether no step has defined a parameter's states yet: torch holds none then."""
    first = state.tensors.get(_role_of(state, name, FIRST_STEP))
    return first is not None and float(first) > 0


def adopt(state: Stored) -> None:
    """Takes over what was loaded into ``optimizer.state``; a parameter without states starts afresh.

    Counters that differ are no longer shared: programs that share them are compiled again.
    """
    if state.optimizer is None or state.functional is None:
        return
    loaded: dict[str, dict[str, torch.Tensor]] = {}
    for name in state.functional.group_of:
        table = state.optimizer.state.get(state.model.get_parameter(name), {})
        loaded[name] = {key: held for key, held in table.items() if isinstance(held, torch.Tensor)}
    check_loaded(state, loaded)
    state.counters.divide(lambda name: _counts(state, name, loaded[name]))
    for name, table in loaded.items():
        specs = state.functional.rule(name, state.model.get_parameter(name)).states
        for key, role in states_of(state, name).items():
            if key in table:
                _copy_into(state, state.settled(role), state.values[role], table[key])
                if state.tensors[role].device.type != state.device.type:
                    state.show(role)
            else:
                state.settled(role).fill_(specs[key].fill or 0.0)
        if (first := _role_of(state, name, FIRST_STEP)) in state.tensors:
            state.tensors[first].fill_(0.0 if table else 1.0)


def _counts(state: Stored, name: str, loaded: Mapping[str, torch.Tensor]) -> tuple:
    """What is loaded for a parameter that it may share with others."""
    places = states_of(state, name)
    held = {key: float(loaded.get(key, 0.0)) for key, role in places.items() if role.owner != name}
    return bool(loaded), tuple(sorted(held.items()))


def check_loaded(state: Stored, loaded: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Refuses to go on without a state that only the optimizer's constructor makes.

    Raises:
        CheckpointError: such a state is missing.
    """
    assert state.functional is not None
    for name in state.functional.group_of:
        specs = state.functional.rule(name, state.model.get_parameter(name)).states
        for key in states_of(state, name):
            missing = key not in loaded.get(name, {})
            if missing and specs[key].fill is None and FIRST_STEP not in specs:
                raise CheckpointError(
                    f"nothing was loaded for {key!r} of {name!r}, which the optimizer makes with its "
                    "parameters and not in a step",
                    do="load a state that has it, or into a new Engine",
                )


def states_of(state: Stored, name: str) -> dict[str, roles.OptimizerState]:
    """The states of a parameter that the programs hold, under torch's keys."""
    assert state.functional is not None
    keys = state.functional.rule(name, state.model.get_parameter(name)).states
    found = {key: _role_of(state, name, key) for key in keys if key != FIRST_STEP}
    return {key: role for key, role in found.items() if role in state.tensors}


def _role_of(state: Stored, name: str, key: str) -> roles.OptimizerState:
    """Where the programs keep a state: with others', or for the parameter."""
    return roles.OptimizerState(state.counters.owner(name, key), key)


def _copy_into(state: Stored, local: torch.Tensor, value: Value, loaded: torch.Tensor) -> None:
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
    local.copy_(state.part_of(loaded, value.placements))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- the numbers of parameter groups


class GroupNumbers:
    """Numbers of parameter groups (learning rates, betas): as they are now, and as programs were told."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._numbers: dict[str, float] = {}
        self._settings: list[dict[str, Any]] | None = None
        self._members: list[list[int]] = []  # ids of each group's parameters
        self._seen: tuple[list[int], list[Any]] = [], []  # as it was told; empty: to be looked at

    def update(
        self, functional: FunctionalOptimizer, tensors: Mapping[roles.Input, torch.Tensor]
    ) -> None:
        """Copies numbers that changed into the programs' inputs.

        Raises:
            FrozenNumberError: a number changed that the program holds as a constant.
        """
        members = [[*map(id, group["params"])] for group in self.optimizer.param_groups]
        sizes, now = _sizes_and_values(self.optimizer)
        same = members == self._members and sizes == self._seen[0]
        if same and all(map(operator.is_, now, self._seen[1])):
            return
        settings = [capture.group_settings(group) for group in self.optimizer.param_groups]
        if self._settings is None:
            self._settings, self._members = settings, members
        if settings != self._settings:
            raise _changed(self._settings, settings)
        if members != self._members:
            raise _moved(self._members, members)
        told = True
        for index, group in enumerate(self.optimizer.param_groups):
            for name, value in capture.group_numbers(group).items():
                full = f"group{index}.{name}"
                if self._numbers.get(full) == value:
                    continue
                _check_number(functional, index, name, value)
                tensor = tensors.get(roles.Scalar(full))
                if tensor is not None:  # a program that takes it may still come
                    self._numbers[full] = value
                    tensor.fill_(value)
                told &= tensor is not None
        # What can change and stay the same object is looked at each time.
        fixed = all(type(one) in _FIXED or _is_of_numbers(one) for one in now)
        self._seen = (sizes, now) if told and fixed else ([], [])


_FIXED = (int, float, bool, str, type(None))


def _is_of_numbers(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in _FIXED for item in value)


def _sizes_and_values(optimizer: torch.optim.Optimizer) -> tuple[list[int], list[Any]]:
    """Of each group how many entries it has; of all groups keys and other values than parameters."""
    sizes: list[int] = []
    found: list[Any] = []
    for group in optimizer.param_groups:
        sizes.append(len(group))
        for key, value in group.items():
            if key != "params":
                found += (key, value)
    return sizes, found


_SET_BEFORE = "set it before the first step, or make a new Engine"


def _moved(before: list[list[int]], now: list[list[int]]) -> FrozenNumberError:
    at = next(i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)
    return FrozenNumberError(
        f"parameter group {at} of the optimizer holds other parameters than when the step was compiled",
        why="the compiled update takes each parameter's numbers from the place of its group",
        do="keep groups and their parameters in the order they had, or make a new Engine",
    )


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> FrozenNumberError:
    if len(now) != len(before):
        what = f"there are {len(now)} parameter groups, there were {len(before)}"
    else:
        what = "; ".join(
            f"{key!r} of parameter group {index} changed from {old.get(key)!r} to {new.get(key)!r}"
            for index, (old, new) in enumerate(zip(before, now, strict=True))
            for key in {*old, *new}
            if old.get(key) != new.get(key)
        )
    return FrozenNumberError(
        f"the optimizer changed after the step was compiled: {what}",
        do=_SET_BEFORE,
    )


def _check_number(functional: FunctionalOptimizer, group: int, name: str, value: float) -> None:
    for (of_group, _, _), rule in functional.rules.items():
        if of_group != group:
            continue
        burnt = rule.constants.get(name)
        broken = any(c.number == name and not c.holds(value) for c in rule.conditions)
        if broken or (burnt is not None and burnt != value):
            raise FrozenNumberError(
                f"{name!r} of parameter group {group} changed to {value} after the step was "
                "compiled, which took it as fixed",
                why="the compiled update has another form for the new value"
                if broken
                else f"this optimizer needs {name!r} as a plain number",
                do=_SET_BEFORE,
            )
