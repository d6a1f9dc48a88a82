"""Global values to run programs on, and running them: sliced for every rank, joined again."""

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from stepgraph.capture.loss import loss_of
from stepgraph.capture.module import in_dtype
from stepgraph.capture.optimizer import group_numbers
from stepgraph.capture.outside_tensors import outside_tensors
from stepgraph.capture.step import Source
from stepgraph.capture.update import MAX_GRAD_NORM
from stepgraph.capture.update_rules import FIRST_STEP
from stepgraph.equivalence.lockstep import Observer, run_lockstep
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, data_mesh
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, Value
from stepgraph.program.randomness import seed_words
from stepgraph.program.record import Results, without_buffers
from stepgraph.program.shards import join, split
from stepgraph.runtime.batches import LocalBatch, split_micro_batches
from stepgraph.torch_internals import pytree

AS_USUAL = StepSettings()


class GlobalValues:
    """A global tensor for every input that a Program of this step may have; plain PyTorch on the same ones.

    Parameters and buffers are the model's own; optimizer states are made up (small random values, a step
    count of 3), so that a program that ignores one is found out. It is what references ask
    (:class:`stepgraph.program.record.Values`).

    Args:
        source: model, loss and optimizer; the model is not changed.
        batch: the global batch.
        settings: of the step.
        max_grad_norm: that gradients are clipped to.
        seed: of what is made up.
    """

    torch_seed = 0  # of torch's own generator, whenever anything is executed

    def __init__(
        self,
        source: Source,
        batch: LocalBatch,
        settings: StepSettings = AS_USUAL,
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        model = source.model
        self.tensors: dict[roles.Input, torch.Tensor] = {
            roles.Param(name): _full(p.detach()) for name, p in model.named_parameters()
        }
        self.tensors |= {roles.Buffer(name): b for name, b in model.named_buffers()}
        outside = outside_tensors(source.loss, model)
        self.tensors |= {roles.Outside(one.name): _full(one.found.detach()) for one in outside}
        self.source, self.batch, self.settings = source, batch, settings
        self.max_grad_norm = max_grad_norm
        self.pieces = split_micro_batches(batch, settings.micro_batches)
        self.leaves = list(self.pieces[-1])
        self.micro_batch = settings.micro_batches - 1  # the leaves are the last one's
        self.random = torch.Generator().manual_seed(seed)
        self.accumulating: Program | None = None  # what all micro-batches but the last run

    def of(self, role: roles.Input, value: Value) -> torch.Tensor:
        """The global tensor of one input."""
        if isinstance(role, roles.UserInput):
            return self.leaves[role.index]
        if role not in self.tensors:
            self.tensors[role] = self._make(role, value)
        return self.tensors[role].to(value.dtype)

    def _make(self, role: roles.Input, value: Value) -> torch.Tensor:
        match role:
            case roles.Tangent():
                return torch.ones((), dtype=value.dtype)
            case roles.Seed():
                return seed_words(0, 3, self.micro_batch)
            case roles.Scalar(name) if name == MAX_GRAD_NORM:
                return torch.tensor(self.max_grad_norm, dtype=value.dtype)
            case roles.Scalar(name):
                group, _, number = name.partition(".")
                assert self.source.optimizer is not None
                numbers = group_numbers(self.source.optimizer.param_groups[int(group[5:])])
                return torch.tensor(numbers[number], dtype=value.dtype)
            case roles.OptimizerState(_, key) if key == FIRST_STEP:
                return torch.zeros((), dtype=value.dtype)
            case roles.OptimizerState() if not value.shape:
                return torch.full((), 3.0, dtype=value.dtype)
            case roles.Accumulator(name) if name.startswith("total:"):
                return torch.full(value.shape, 7, dtype=value.dtype)
        made = torch.rand(value.shape, generator=self.random, dtype=torch.float32)
        return (made * 1e-3).to(value.dtype)  # about the size of gradients

    def execute(
        self,
        programs: Program | Sequence[Program],
        replaced: Mapping[str, Any] | None = None,
        inputs: Results | None = None,
        *,
        in_place: bool = False,
        observe: Observer | None = None,
    ) -> dict[Any, torch.Tensor]:
        """All global results of a Program (or of every rank's own).

        Args:
            replaced: by stable name: ``f(node, arguments, keywords) -> value`` in place of an operation.
            inputs: to run on in place of those that are given.
            in_place: the programs write their state; count what was written as results.
        """
        first = programs if isinstance(programs, Program) else programs[0]
        local = self._local(first, inputs or {})
        with torch.random.fork_rng(devices=[]):  # what draws from torch's generator draws alike
            torch.manual_seed(self.torch_seed)
            results = run_lockstep(programs, list(zip(*local, strict=True)), observe, replaced)
        return self._whole(first, local, results, in_place)

    def run_all(self, programs: Sequence[Program], codes: Sequence[Any]) -> dict[Any, torch.Tensor]:
        """:meth:`execute` of what was made of every rank's Program, each rank a thread.

        Args:
            codes: from local inputs to local results; they write their state in place.
        """
        first = programs[0]
        local = self._local(first, {})
        columns = zip(*local, strict=True)
        with ThreadPoolExecutor(len(codes)) as pool:
            results = list(pool.map(lambda code, row: code(list(row)), codes, columns))
        written = [roles.written_input(role) in first.inputs for role in first.outputs]
        outputs = [i for i, in_place in enumerate(written) if not in_place]
        return self._whole(first, local, results, True, outputs)

    def _local(self, program: Program, given: Results) -> list[list[torch.Tensor]]:
        """Every rank's part of every input."""
        mesh = program.mesh or data_mesh(1)
        rows = program.input_rows
        return [self._sliced(given.get(r, self.of(r, value)), value, mesh) for r, _, value in rows]

    def _whole(
        self,
        program: Program,
        local: list[list[torch.Tensor]],
        results: Sequence[Sequence[Any]],
        in_place: bool,
        outputs: Sequence[int] | None = None,
    ) -> dict[Any, torch.Tensor]:
        mesh = program.mesh or data_mesh(1)
        found: dict[Any, torch.Tensor] = {}
        for place, index in enumerate(range(len(program.outputs)) if outputs is None else outputs):
            parts = [result[place] for result in results]
            found[program.outputs[index]] = _join(parts, program.output_values[index], mesh)
        if in_place:
            for (role, _, value), parts in zip(program.input_rows, local, strict=True):
                if (replacing := _REPLACING.get(type(role))) is not None:
                    found[replacing(**vars(role))] = _join(parts, value, mesh)
        return found

    def _sliced(self, tensor: torch.Tensor, value: Value, mesh: MeshShape) -> list[torch.Tensor]:
        if value.placements is None:
            return [tensor.clone() for _ in range(mesh.world_size)]
        return split(tensor, value.placements, mesh)

    # -- what references ask

    def inside(self, program: Program, names: Any) -> tuple[Results, dict[str, torch.Tensor]]:
        """:meth:`execute`, and the values of some operations by name."""
        seen: dict[str, torch.Tensor] = {}

        def observe(rank: int, node: Any, value: Any) -> None:
            if meta(node).get("name") in names:
                seen[meta(node)["name"]] = value

        return self.execute(program, observe=observe), seen

    def on_all_ranks(self, value: Any) -> list[Any]:
        """The value: one process has all there is."""
        return [value]

    def given(self, program: Program) -> Results:
        """The global tensors of a Program's inputs by role."""
        return {role: self.of(role, value) for role, _, value in program.input_rows}

    def eager(self) -> Results:
        """Loss, gradients and written buffers of plain PyTorch on the last micro-batch."""
        return self._plain(self.leaves)

    def evaluated(self) -> Results:
        """What the loss callable returns in evaluation mode, on the last micro-batch."""
        model, batch = self._model_and_batch(self.leaves)
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.torch_seed)
            found = pytree.tree_leaves(self.source.loss(model, batch))
        tensors = {roles.UserOutput(i): x for i, x in enumerate(found)}
        return {role: x for role, x in tensors.items() if isinstance(x, torch.Tensor)}

    def whole_batch(self, exact: bool) -> Results:
        """Loss and gradients of plain PyTorch on the whole batch; not ``exact``: the mean over parts."""
        if exact:
            return without_buffers(self._plain(list(self.batch.leaves)))
        each = [without_buffers(self._plain(leaves)) for leaves in self.pieces]
        return {role: sum(e[role] for e in each) / len(each) for role in each[0]}  # type: ignore[misc]

    def accumulate(self) -> None:
        """Runs all micro-batches but the last on the program ``accumulate``, from nothing."""
        assert self.accumulating is not None
        for role, tensor in self.tensors.items():
            if isinstance(role, roles.Accumulator):
                self.tensors[role] = torch.zeros_like(tensor)
        for leaves in self.pieces[:-1]:
            self.leaves = list(leaves)
            for role, value in self.execute(self.accumulating).items():
                if isinstance(role, roles.NewAccumulator):
                    self.tensors[roles.Accumulator(role.name)] = value
        self.leaves = list(self.pieces[-1])

    def clipped(self, gradients: Results) -> Results:
        """Gradients as ``torch.nn.utils.clip_grad_norm_`` leaves them."""
        leaves = {role: torch.zeros_like(v) for role, v in gradients.items()}
        for role, leaf in leaves.items():
            leaf.grad = gradients[role].clone()
        torch.nn.utils.clip_grad_norm_(leaves.values(), self.max_grad_norm or 0.0)
        return {role: leaf.grad for role, leaf in leaves.items() if leaf.grad is not None}

    def _model_and_batch(self, leaves: Sequence[Any]) -> tuple[nn.Module, Any]:
        model = copy.deepcopy(self.source.model)
        compute = self.settings.precision.compute
        for parameter in model.parameters():
            parameter.data = in_dtype(parameter.data, compute)
        cast = [in_dtype(x, compute) if isinstance(x, torch.Tensor) else x for x in leaves]
        return model, pytree.tree_unflatten(cast, self.batch.tree)

    def _plain(self, leaves: Sequence[Any]) -> Results:
        model, batch = self._model_and_batch(leaves)
        model.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.torch_seed)
            loss = loss_of(self.source.loss(model, batch))
        loss.backward()
        found: dict[Any, torch.Tensor] = {roles.Loss(): loss.detach()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[roles.Grad(name)] = parameter.grad
        return found | {roles.NewBuffer(name): b for name, b in model.named_buffers()}

    def stepped(self, results: Results, program: Program) -> Results:
        """New parameters and states after one step of the user's own optimizer class.

        Args:
            results: holds the gradients.
            program: has the optimizer states as inputs.
        """
        optimizer = self.source.optimizer
        assert optimizer is not None
        names = {id(p): name for name, p in self.source.model.named_parameters()}
        states: dict[str, dict[str, torch.Tensor]] = {}
        for role, _, value in program.input_rows:
            if isinstance(role, roles.OptimizerState):
                states.setdefault(role.owner, {})[role.key] = self.of(role, value)
        clone = copy.copy(optimizer)
        clone.__dict__ = dict(optimizer.__dict__)
        clone.param_groups = [dict(group) for group in optimizer.param_groups]
        clone.state = type(optimizer.state)(dict)
        owner_of: dict[str, torch.Tensor] = {}
        for index, group in enumerate(clone.param_groups):
            named = [names[id(p)] for p in group["params"]]
            group["params"] = [self.tensors[roles.Param(name)].clone() for name in named]
            for name, leaf in zip(named, group["params"], strict=True):
                leaf.grad = results.get(roles.Grad(name))
                owner_of[name] = leaf
                held = {**states.get(f"group{index}", {}), **states.get(name, {})}
                held.pop(FIRST_STEP, None)
                if held and leaf.grad is not None:
                    clone.state[leaf] = {key: tensor.clone() for key, tensor in held.items()}
                owner_of.setdefault(f"group{index}", leaf)
        step = type(optimizer).step
        getattr(step, "__wrapped__", step)(clone)
        expected: dict[Any, Any] = {}
        for output in program.outputs:
            if isinstance(output, roles.NewParam):
                expected[output] = owner_of[output.name]
            elif isinstance(output, roles.NewOptimizerState):
                state = clone.state[owner_of[output.owner]]
                if output.key in state:
                    expected[output] = state[output.key]
        return expected


def _join(parts: Sequence[torch.Tensor], value: Value, mesh: MeshShape) -> torch.Tensor:
    if value.placements is None:
        return parts[0]
    return join(parts, value.shape, value.placements, mesh)


# The output whose value an input's storage holds after an in-place program; its fields are the input's.
_REPLACING: dict[type, Any] = {
    roles.Param: roles.NewParam,
    roles.Buffer: roles.NewBuffer,
    roles.OptimizerState: roles.NewOptimizerState,
    roles.Accumulator: roles.NewAccumulator,
}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
