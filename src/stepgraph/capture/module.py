"""Captures a module, its loss and a batch as one functional joint Program.

dynamo captures the Python code whole, AOTAutograd adds the backward and makes it functional
(``torch/_functorch/aot_autograd.py``); what is left here is to say what every input, output and
operation is, in the model's own names. Nothing runs: the batch is fake and so is the arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from stepgraph import torch_internals
from stepgraph.capture.annotations import annotate, settle_phases
from stepgraph.capture.canonical import canonicalise
from stepgraph.capture.decompositions import decomposition_table
from stepgraph.capture.device_code import asks_for_device, difference_notes
from stepgraph.capture.loss import check_call, check_loss, loss_of
from stepgraph.capture.mixed_types import check_types, mixed_types_error
from stepgraph.capture.outside_tensors import OutsideTensor, outside_tensors
from stepgraph.capture.python_values import PythonValues, values_of
from stepgraph.capture.read_numbers import keep_as_tensors
from stepgraph.capture.refusals import (
    check_assigned_buffers,
    check_assigned_data,
    check_hooks,
    check_parameter_hooks,
    drawn_number,
    graph_break_error,
    operator_error,
    own_function_error,
)
from stepgraph.capture.results import Results, take_constants, unknown_result
from stepgraph.capture.stand_ins import lent_stand_ins
from stepgraph.errors import CaptureError, LossError
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, Value
from stepgraph.torch_internals import custom_operators, effects, other_device, pytree
from stepgraph.torch_internals.export import differentiates_own_function, export_graph

LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class BatchSpec:
    """Structure and leaves of a batch of the global shape.

    ``leaves`` are fake tensors, or the constants (numbers, strings, None) that the program is
    specialised to; ``paths`` name them (``input_ids``).
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    tree: pytree.TreeSpec

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves, in order: what the captured program takes."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def with_twice_the_rows(self) -> BatchSpec:
        """The same batch, each of its tensors twice as long."""

        def twice(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                return leaf
            return leaf.new_empty((2 * leaf.shape[0], *leaf.shape[1:]))

        return replace(self, leaves=tuple(map(twice, self.leaves)))


def default_loss(model: nn.Module, batch: Any) -> Any:
    """``model(**batch).loss`` for a mapping, ``model(*batch)`` for a sequence, else ``model(batch)``."""
    if isinstance(batch, dict):
        result = model(**batch)
    elif isinstance(batch, (tuple, list)):
        result = model(*batch)
    else:
        result = model(batch)
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    return result if loss is None else loss


def capture(
    model: nn.Module,
    loss: LossFunction,
    batch: BatchSpec,
    *,
    training: bool = True,
    as_module: bool = False,
    compute_dtype: torch.dtype | None = None,
    device_type: str = "",
    says_difference: bool = False,
    compares: bool = False,
    micro_batches: int = 1,
) -> tuple[Program, Results, PythonValues]:
    """Captures ``loss(model, batch)``, with its backward if ``training``.

    Args:
        model: parameters may be real, fake or on the meta device; it is not changed.
        loss: called as ``loss(model, batch)``; its first leaf must be a floating-point scalar where
            ``training``.
        batch: leaves of the global shape.
        training: with gradients; otherwise the module's forward under ``torch.no_grad()``.
        as_module: everything that ``loss`` returns is a result, each with a tangent of its own.
        compute_dtype: of floating-point parameters and batch leaves; None: as they are.
        device_type: what it will run on, whose autocast casts, and which its code is told of; by default
            the host.
        says_difference: note where the model is another one on the host.
        compares: the Python values that the code read will be compared from call to call.
        micro_batches: forwards of one step.

    Returns:
        the Program, with outputs ``Loss`` and ``Grad`` (training), ``UserOutput``, or ``ModuleResult`` (and
        ``Grad``), ``InputGrad`` of leaves that require a gradient, and ``NewBuffer``;
        the structure of what ``loss`` returned;
        the Python values that were read and are changed.

    Raises:
        GraphBreakError, HookError, LossError, CaptureError.
    """
    if loss is default_loss:
        check_call(model, pytree.tree_unflatten(list(batch.leaves), batch.tree))
    check_hooks(model)
    check_parameter_hooks(model)
    device_type = device_type or torch_internals.host_device().type
    only_loss = training and not as_module
    notes: list[str] = []
    module = _StepFunction(
        model, loss, batch, compute_dtype, only_loss=only_loss, detached=not training
    )
    outside = outside_tensors(loss, model)
    with (
        lent_stand_ins(model, outside, batch.tensors, compute_dtype),
        torch.set_grad_enabled(training),
        other_device.as_everywhere(),
    ):
        try:
            with other_device.told_of(device_type):
                captured, flat_names, assigned, heard = export_graph(module, tuple(batch.tensors))
            check_assigned_buffers(assigned)
            check_assigned_data(captured)
            values = values_of(heard, compares, micro_batches)
            if says_difference and asks_for_device(heard.codes, device_type):
                notes += difference_notes(captured, module, batch.tensors, device_type)
            if differentiates_own_function(captured):
                raise own_function_error(model)
            numbers = keep_as_tensors(captured)
            constants = take_constants(captured)
            notes += canonicalise(captured)
            other_device.enter_on_host(captured, device_type)
            names = _canonical_names(model, captured, flat_names)
            read = _read_from_outside(outside, captured)
            with (
                other_device.casts_of(device_type),
                custom_operators.keeping_triton_operators(),
                effects.keeping_checks(),
            ):
                joint, result_tree = torch_internals.joint_graph(
                    captured, tuple(batch.tensors), decomposition_table()
                )
        except torch_internals.GRAPH_BREAKS as error:
            raise graph_break_error(error) from error
        except torch_internals.DynamoError as error:
            cause = error.__cause__
            if isinstance(cause, LossError):
                raise cause from None
            if (mixed := mixed_types_error(error, compute_dtype)) is not None:
                raise mixed from error
            raise graph_break_error(error) from error
        except AssertionError as error:
            if (clear := unknown_result(error, model) or drawn_number(error)) is None:
                raise
            raise clear from error
        except (RuntimeError, UserWarning) as error:
            clear = operator_error(error) or mixed_types_error(error, compute_dtype)
            if clear is None:
                raise
            raise clear from error
    kind = roles.ModuleResult if as_module else None if training else roles.UserOutput
    program = _describe(joint, names, read, batch, kind)
    check_types(program, compute_dtype)
    for note in notes:
        program.note(note)
    taken = {role.name for role in program.inputs if isinstance(role, roles.Outside)}
    values = replace(values, tensors=tuple(one for one in outside if one.name in taken))
    return program, Results(result_tree, constants, numbers), values


class _StepFunction(nn.Module):
    """What dynamo traces: flat tensors in, the loss (or all that the loss callable returned) out."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        batch: BatchSpec,
        compute_dtype: torch.dtype | None,
        *,
        only_loss: bool,
        detached: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.constants = [
            None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in batch.leaves
        ]
        self.tree = batch.tree
        self.compute_dtype = compute_dtype
        self.only_loss, self.detached = only_loss, detached

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = [in_dtype(tensor, self.compute_dtype) for tensor in tensors]
        leaves = [remaining.pop(0) if const is None else const[0] for const in self.constants]
        result = self.loss(self.model, pytree.tree_unflatten(leaves, self.tree))
        if self.detached:  # code may say that it computes gradients, in an evaluation too
            result = pytree.tree_map(_detached, result)
        return loss_of(result) if self.only_loss else result


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A floating-point tensor in another type; others as they are."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _canonical_names(
    model: nn.Module, captured: fx.GraphModule, flat_names: dict[str, str]
) -> dict[str, str]:
    """dynamo's flat names -> the first of the model's own names for that tensor (tied weights).

    Matched by identity: how dynamo spells a name depends on how the code reached the tensor. Call it
    while the model holds the stand-ins that were captured.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    canonical = {}
    for flat, tensor in [*captured.named_parameters(), *captured.named_buffers()]:
        own = flat_names.get(flat, "").removeprefix("model.")
        if id(tensor) in first:
            canonical[flat] = first[id(tensor)]
        elif own in tensors:
            canonical[flat] = first[id(tensors[own])]
    return canonical


def _read_from_outside(
    outside: Sequence[OutsideTensor], captured: fx.GraphModule
) -> dict[str, str]:
    """dynamo's flat names -> the code's own, of tensors that are not the model's."""
    names = {id(one.now): one.name for one in outside}
    held = [*captured.named_parameters(), *captured.named_buffers()]
    return {flat: names[id(tensor)] for flat, tensor in held if id(tensor) in names}


_GRADIENTS = (roles.Grad, roles.InputGrad)
_STEP_PATH = re.compile(r"L\['self'\]\.model\.?")
_UNCHECKED = (
    "{}: its check is no part of the step; where it has no result, the loss is not a number"
)


def _describe(
    joint: fx.GraphModule,
    names: dict[str, str],
    read: dict[str, str],
    batch: BatchSpec,
    result: Callable[[int], roles.Output] | None,
) -> Program:
    """Turns descriptors and torch's metadata into roles, phases, module paths and stable names."""
    tensor_leaves = [i for i, leaf in enumerate(batch.leaves) if isinstance(leaf, torch.Tensor)]

    def own_name(flat: str) -> str:
        if flat in names:
            return names[flat]
        raise CaptureError(
            f"the step reads a tensor that is neither a parameter nor a buffer of the model: {flat}",
            why="where the code has it is not found, so nobody would see it change",
            do="register it as a buffer of the model, or pass it in the batch",
        )

    def input_role(description: tuple[str, Any]) -> roles.Input:
        match description:
            case ("param" | "buffer", flat) if flat in read:
                return roles.Outside(read[flat])
            case ("param", flat):
                return roles.Param(own_name(flat))
            case ("buffer", flat):
                return roles.Buffer(own_name(flat))
            case ("plain", index):
                leaf = tensor_leaves[index]
                return roles.UserInput(leaf, batch.paths[leaf])
            case ("tangent", ("mutation", source)):
                raise _written(input_role(source))
            case ("tangent", ("output", index)):
                return roles.Tangent() if result is None else roles.ResultTangent(index)
        raise CaptureError(f"an input of the captured graph is not understood: {description}")

    checked = effects.drop_checks(joint)
    pairs_in, pairs_out = torch_internals.descriptors(joint)
    inputs, input_values, outputs, output_values, results = [], [], [], [], []
    for node, descriptor in pairs_in:
        role = input_role(torch_internals.describe(descriptor))
        meta(node)["name"] = roles.label(role)
        inputs.append(role)
        input_values.append(Value.of(node))
    for node, descriptor in pairs_out:
        if not isinstance(node, fx.Node):
            continue
        role = _output_role(torch_internals.describe(descriptor), input_role, result)
        if role is None:
            continue
        outputs.append(role)
        results.append(node)
        output_values.append(Value.of(node))
    _set_results(joint.graph, results)
    if result is None:
        losses = [x for x, role in zip(output_values, outputs, strict=True) if role == roles.Loss()]
        check_loss(losses[0] if losses else None, any(isinstance(r, _GRADIENTS) for r in outputs))
    program = Program("joint", joint, inputs, outputs, input_values, output_values)
    for name in checked:
        program.note(_UNCHECKED.format(name))
    for node in joint.graph.nodes:
        annotate(node, _STEP_PATH)
    settle_phases(program)
    written = {roles.written_input(role) for role in program.outputs}
    program.keep_inputs(
        lambda role, node: bool(node.users) or role in written or isinstance(role, roles.UserInput)
    )
    program.drop_dead()  # before anything is named
    return program.finish()


def _output_role(description, input_role, result) -> roles.Output | None:
    match description:
        case ("output", index):
            return roles.Loss() if result is None else result(index)
        case ("mutation", source):
            written = input_role(source)
            if not isinstance(written, roles.Buffer):
                raise _written(written)
            return roles.NewBuffer(written.name)
        case ("grad", source):
            role = input_role(source)
            if isinstance(role, roles.UserInput):
                return roles.InputGrad(role.index)
            return roles.Grad(role.name) if isinstance(role, roles.Param) else None
    raise CaptureError(f"a result of the captured graph is not understood: {description}")


def _written(role: roles.Input) -> CaptureError:
    return CaptureError(
        f"the forward pass writes into {roles.label(role)} in place",
        do="write into a buffer, or into a copy, instead",
    )


def _set_results(graph: fx.Graph, results: list[fx.Node]) -> None:
    output = graph.output_node()
    graph.erase_node(output)
    # The plain code generator returns the tuple as it stands; the joint graph's nests it.
    graph.set_codegen(fx.graph.CodeGen())
    graph.output(tuple(results))
