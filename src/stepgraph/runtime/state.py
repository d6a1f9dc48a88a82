"""The state of a run: parameters, buffers, optimizer states and numbers, as this rank stores them.

Local tensors are stored padded to equal shards (one Program serves all ranks). What the user sees are
DTensors that view their unpadded part: a step writes the storage in place, so they are always current.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stepgraph import errors, torch_internals
from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.update import MAX_GRAD_NORM
from stepgraph.capture.update_rules import FunctionalOptimizer
from stepgraph.lowering.graphs.captured import LAST
from stepgraph.placement.presets.named import stored_parameter
from stepgraph.program import roles
from stepgraph.program.copies import is_on_host
from stepgraph.program.layout import local_shape, replicated
from stepgraph.program.program import Program, Value
from stepgraph.program.randomness import host_seed, seed_words
from stepgraph.runtime import optimizer_state
from stepgraph.runtime.buffers import PlacesOfBuffers
from stepgraph.runtime.ranks import Ranks, agree_on
from stepgraph.torch_internals import dtensors, hooks
from stepgraph.torch_internals.storages import Memory


class State(optimizer_state.Stored):
    """All tensors that outlive a step.

    Args:
        model: its parameters are replaced by DTensors, in place, under their own names.
        optimizer: over the model's parameters; its groups are pointed at the new ones.
        ranks: this process's place.
        preset: says how parameters are stored.
        device: where everything lives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        preset: str,
        device: torch.device,
    ) -> None:
        super().__init__(model, optimizer, ranks, device)
        self.counters = SharedCounters(_while_alive(self, State._divide_counters))
        self.before = Memory()  # of what the model was given with
        self._installed: dict[str, torch.Tensor] = {}  # what each parameter held when it was placed
        self.unfilled: dict[
            str, tuple[torch.Tensor, int]
        ] = {}  # what stands for them, never written
        self.how_to_fill = (
            "call engine.load(...) or engine.load_state_dict(...) before the first step"
        )
        self._numbers = optimizer_state.GroupNumbers(optimizer) if optimizer is not None else None
        self._accumulators: list[torch.Tensor] | None = None
        self._drawn_from: list[int] = []  # the words of the seed that a program was given last
        self._seed_holds: list[int] | None = None  # what the seed holds; None: it is not known
        named = dict(model.named_parameters())
        _check_optimizer(optimizer, named)
        replaced = {
            tensor: self._shard_parameter(name, tensor, preset) for name, tensor in named.items()
        }
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                buffer = torch.empty_like(buffer, device=device)
                self.unfilled[name] = (buffer, buffer._version)
            else:
                buffer = buffer.to(device)
                agree_on(buffer, ranks)
            self.tensors[roles.Buffer(name)] = buffer
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = buffer
        self.buffers = PlacesOfBuffers(model)
        _replace_parameters(model, optimizer, replaced)
        self.parameters = dict(zip(named, replaced.values(), strict=True))
        if optimizer is not None:
            publish = _while_alive(self, lambda state, _: optimizer_state.publish(state))
            adopt = _while_alive(self, lambda state, _: optimizer_state.adopt(state))
            optimizer.register_state_dict_pre_hook(publish)
            optimizer.register_load_state_dict_post_hook(adopt)

    def _shard_parameter(self, name: str, tensor: nn.Parameter, preset: str) -> nn.Parameter:
        if not tensor.is_meta:
            self.before.remember(name, tensor)
        stored = stored_parameter(preset, tuple(tensor.shape), self.ranks.shape)
        value = Value(tuple(tensor.shape), tensor.dtype, stored)
        if tensor.is_meta:
            local = self.filled(value)
        else:
            whole = tensor.detach().to(self.device).contiguous()
            agree_on(whole, self.ranks)
            local = self.part_of(whole, stored)
            if any(isinstance(p, Shard) for p in stored):
                local = local.clone()  # a view would keep the whole parameter alive
        self.tensors[roles.Param(name)] = local
        parameter = nn.Parameter(self.as_dtensor(local, value), requires_grad=tensor.requires_grad)
        self._installed[name] = dtensors.own_part(parameter)  # type: ignore[arg-type]
        if tensor.is_meta:
            self.unfilled[name] = (parameter, parameter._version)
        hooks.share_hooks(tensor, parameter)
        return parameter

    # -- what programs take

    def prepare(
        self,
        program: Program,
        functional: FunctionalOptimizer | None,
        max_grad_norm: float | None,
    ) -> None:
        """Makes the tensors that a compiled program takes and that do not exist yet."""
        if functional is not None:
            self.functional = functional.with_earlier(self.functional)
        for role, node, value in program.input_rows:
            held = self.values.get(role, value)
            self.values[role] = value
            if isinstance(role, roles.Param):
                self.store_as(role, value)
            elif held.placements != value.placements:  # under another plan
                optimizer_state.place(self, role, held)
            if role in self.tensors and isinstance(role, roles.OptimizerState):
                self.hold(role, self.settled(role), is_on_host(node))
            if role in self.tensors or isinstance(role, roles.BROUGHT):
                continue
            match role:
                case roles.OptimizerState(owner, key):
                    tensor = optimizer_state.first_value(self, owner, key, value)
                case roles.Scalar(name) if name == MAX_GRAD_NORM:
                    tensor = torch.full((), max_grad_norm or 0.0, dtype=value.dtype)
                case roles.HostSeed():
                    self.tensors[role] = torch.zeros(
                        (), dtype=value.dtype, device=torch_internals.host_device()
                    )
                    continue
                case _:
                    tensor = self.filled(value)
            self.hold(role, tensor, is_on_host(node))
        self._accumulators = None

    def _divide_counters(self, old: str, new: list[str]) -> None:
        """Counters that were one go on from the same numbers, apart."""
        held = [role for role in self.tensors if isinstance(role, roles.OptimizerState)]
        for role in (role for role in held if role.owner == old):
            tensor, value = self.tensors.pop(role), self.values.pop(role)
            for label in new:
                part = roles.OptimizerState(label, role.key)
                self.tensors[part], self.values[part] = tensor.clone(), value

    def store_as(self, role: roles.Param, value: Value) -> None:
        """Shards a parameter as a program wants it, if it is stored otherwise."""
        parameter = self.model.get_parameter(role.name)
        assert isinstance(parameter, DTensor) and value.placements is not None
        if tuple(parameter.placements) == value.placements:
            return
        self._install(role, parameter, value)

    def _install(self, role: roles.Param, parameter: DTensor, value: Value) -> None:
        """Stores what a parameter has now: where programs have it, if that can be."""
        assert value.placements is not None
        local = self.part_of(parameter.detach(), value.placements)
        held = self.tensors[role]
        if (held.shape, held.dtype, held.device) == (local.shape, local.dtype, local.device):
            local = held.copy_(local)
        else:
            local = self.tensors[role] = local.clone()
        dtensors.replace_parts(parameter, self.as_dtensor(local, value))
        self._installed[role.name] = dtensors.own_part(parameter)

    def adopt_converted(self) -> bool:
        """Stores parameters and buffers anew that were replaced since: ``model.to(dtype)``, ``to_empty``.

        Returns:
            whether one is of another type, so that programs must be made anew.

        Raises:
            UsageError: of :meth:`adopt_parameters`, and of a buffer that cannot be taken.
        """
        converted = self.adopt_parameters()
        adopted = self.buffers.adopt()
        for name, buffer in adopted.items():
            self.tensors[roles.Buffer(name)] = buffer
            self.unfilled.pop(name, None)
        return bool(adopted) or converted

    def adopt_parameters(self) -> bool:
        """:meth:`adopt_converted` of the parameters alone: where code reads buffers, it may replace them.

        Raises:
            UsageError: an optimizer's state is with the old ones.
        """
        found = [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if dtensors.own_part(parameter) is not self._installed[name]
        ]
        if found and self.functional is not None:
            raise errors.UsageError(
                f"parameters were converted or moved after the first step: "
                f"{errors.name_a_few([name for name, _ in found])}",
                why="the optimizer's state in the compiled step is of the old type and place",
                do="convert the model before it is given to Engine, or use compute_dtype",
            )
        before = dict(self.tensors) if found else {}
        for name, parameter in found:
            value = Value(tuple(parameter.shape), parameter.dtype, tuple(parameter.placements))
            self._install(roles.Param(name), parameter, value)
            self.unfilled.pop(name, None)
        return any(self.tensors[role] is not held for role, held in before.items())

    def clear_accumulators(self) -> None:
        """Zeroes every accumulator, before the first micro-batch of a step."""
        if self._accumulators is None:
            held = self.tensors.items()
            self._accumulators = [t for role, t in held if isinstance(role, roles.Accumulator)]
        torch_internals.zero_all(self._accumulators)

    def seed_random_operations(self, seed: int, step: int, micro_batch: int) -> None:
        """Sets what random operations draw from, where a program has any."""
        if (tensor := self.tensors.get(roles.Seed())) is not None:
            # Written by kernels: nothing is copied from the host, and nothing waits.
            words, holds = seed_words(seed, step, micro_batch).tolist(), self._seed_holds
            for index, word in enumerate(words):
                if holds is None or holds[index] != word:
                    tensor[index].fill_(word)
            self._drawn_from, self._seed_holds = words, None
        if (tensor := self.tensors.get(roles.HostSeed())) is not None:
            tensor.fill_(host_seed(seed, step, micro_batch))

    def seed_was_advanced(self, program: str) -> None:
        """A program has run that advances the seed itself, to what the next one draws from."""
        seed, step, micro_batch = self._drawn_from
        last = program == LAST
        self._seed_holds = [seed, step + last, 0 if last else micro_batch + 1]

    def own_parts(
        self, gradients: Mapping[str, torch.Tensor], program: Program
    ) -> dict[roles.Input, torch.Tensor]:
        """The gradients that an update takes, each this rank's (padded) part."""
        values = dict(zip(program.inputs, program.input_values, strict=True))
        found: dict[roles.Input, torch.Tensor] = {}
        for name, gradient in gradients.items():
            role = roles.GivenGrad(name)
            placements = values[role].placements
            assert placements is not None
            shape = local_shape(values[role].shape, placements, self.ranks.shape)
            if isinstance(gradient, DTensor) and tuple(gradient.placements) == placements:
                part = gradient.to_local()
            else:
                part = self.part_of(gradient, placements)
            found[role] = part
            if part.shape != shape:
                found[role] = part.new_zeros(shape)
                found[role][tuple(map(slice, part.shape))] = part
        return found

    def check_filled(self) -> None:
        """Refuses to compute with a model on the meta device that nobody filled.

        Raises:
            UnfilledModelError: names what is missing.
        """
        for name, (tensor, version) in list(self.unfilled.items()):
            if tensor._version != version or self._was_replaced(name):
                del self.unfilled[name]
        if self.unfilled:
            raise errors.UnfilledModelError(
                f"the model was on the meta device, and has no values for: "
                f"{errors.name_a_few(sorted(self.unfilled))}",
                do=self.how_to_fill,
            )

    def _was_replaced(self, name: str) -> bool:
        parameter = self.parameters.get(name)
        if parameter is None:
            return self.model.get_buffer(name) is not self.tensors[roles.Buffer(name)]
        return dtensors.own_part(parameter) is not self._installed[name]  # type: ignore[arg-type]

    def update_numbers(self) -> None:
        """Copies the numbers of the optimizer's parameter groups (learning rates) into inputs.

        Raises:
            FrozenNumberError: a number changed that the program holds as a constant.
        """
        if self._numbers is not None and self.functional is not None:
            self._numbers.update(self.functional, self.tensors)

    def mark_written(self) -> None:
        """Tells autograd that parameters have other values: a program wrote them where it does not look."""
        torch.autograd.graph.increment_version(list(self.parameters.values()))

    # -- state dicts

    def state_dict(self) -> dict[str, Any]:
        """The module's own keys, tied names and buffers included, as DTensors."""
        return {
            name: self.whole_dtensor(value)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            else value
            for name, value in self.model.state_dict().items()
        }

    def whole_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """A DTensor that views a tensor which every rank holds whole."""
        whole = replicated(self.ranks.shape)
        return self.as_dtensor(tensor, Value(tuple(tensor.shape), tensor.dtype, whole))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies whole or distributed tensors into the stored parts.

        Raises:
            CheckpointError: a key is missing or unknown, or a shape differs.
        """
        own = self.model.state_dict(keep_vars=True)
        optional = dict(self.model.named_buffers())  # buffers outside the state dict may come too
        unknown = [key for key in state if key not in own and key not in optional]
        given = {id(own[key]) for key in state if key in own}
        # A tied tensor may come under one of its names only, as transformers' files have it.
        missing = [key for key in own if key not in state and id(own[key]) not in given]
        if unknown or missing:
            raise errors.CheckpointError(
                f"the state dict does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}"
            )
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        names |= {id(tensor): name for name, tensor in self.model.named_buffers()}
        for key, value in state.items():
            target = own.get(key, optional.get(key))
            if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if tuple(target.shape) != tuple(value.shape):
                raise errors.CheckpointError(
                    f"{key!r} has shape {list(value.shape)} in the state dict and "
                    f"{list(target.shape)} in the model"
                )
            name = names[id(target)]
            if isinstance(target, DTensor):
                part = self.part_of(value.detach(), target.placements)
                self.tensors[roles.Param(name)].copy_(part)
            else:
                with torch.no_grad():  # a forward may have made it
                    target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
            self.unfilled.pop(name, None)


def _while_alive(state: State, function: Callable[..., None]) -> Callable[..., None]:
    """``function(state, ...)`` for what may outlive the engine: it holds no state itself."""
    own = weakref.ref(state)

    def call(*arguments: Any) -> None:
        if (held := own()) is not None:
            function(held, *arguments)

    return call


def _check_optimizer(
    optimizer: torch.optim.Optimizer | None, named: dict[str, nn.Parameter]
) -> None:
    if optimizer is None:
        return
    known = {id(tensor) for tensor in named.values()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tensor for tensor in group["params"] if id(tensor) not in known]
        if foreign:
            raise errors.OptimizerError(
                f"parameter group {index} of the optimizer holds {len(foreign)} tensors that are not "
                f"parameters of the model (the first has shape {list(foreign[0].shape)})",
                do="build the optimizer from model.parameters() of the model given to Engine",
            )


def _replace_parameters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    replaced: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Puts new parameters wherever the old ones were: modules (tied ones too), groups, states."""
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor in replaced:
                module._parameters[name] = replaced[tensor]
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [replaced[tensor] for tensor in group["params"]]
        for old in [tensor for tensor in optimizer.state if tensor in replaced]:
            optimizer.state[replaced[old]] = optimizer.state.pop(old)
