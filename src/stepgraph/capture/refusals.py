"""What cannot be captured, each with an error that says where and what to do.

Nothing here is silently dropped: a gradient hook or a branch on data that vanished
from the captured program would train another model than the user wrote.
"""

import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from stepgraph.errors import CaptureError, GraphBreakError, HookError, ParameterHookError
from stepgraph.operators import own
from stepgraph.torch_internals import custom_operators, hooks, watchers
from stepgraph.torch_internals.assigned_buffers import assigned_data, assigns_behind

_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_USER_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def check_hooks(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuses hooks that a captured program would drop without a word.

    Those on a module's backward and around the optimizer's step. (A hook that the forward itself registers
    on an activation is captured with it.)

    Raises:
        HookError: names the parameter, module or optimizer.
    """
    if optimizer is not None and hooks.step_hooks(optimizer):
        raise HookError(
            f"the optimizer ({type(optimizer).__name__}) has step hooks, or all optimizers have, which "
            "a captured step cannot call",
            do="call what they do after engine.step(batch)",
        )
    if watchers.of_users()[1]:
        raise HookError(
            "all modules have a backward hook (register_module_full_backward_hook and its kin), which a "
            "captured step cannot call",
            do="remove it while stepgraph trains, or write it as a torch.autograd.Function in the forward",
        )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise HookError(
                f"module {name or type(module).__name__!r} has a backward hook, which a captured "
                "step cannot call",
                do="remove it, or write it as a torch.autograd.Function in the forward",
            )


def check_parameter_hooks(model: nn.Module) -> None:
    """Refuses to capture a model whole while a parameter has a hook on its gradient.

    Raises:
        ParameterHookError: names the parameter.
    """
    for name, parameter in model.named_parameters():
        if hooks.gradient_hooks(parameter):
            raise ParameterHookError(
                f"parameter {name!r} has a gradient hook, which a captured step cannot call",
                why="the whole step is one program; no Python runs between a gradient and its update",
                do="remove the hook (for clipping use max_grad_norm, for scaling put it into the loss), or "
                "let the model run graph by graph: strict=False",
            )


def check_assigned_buffers(buffers: list[str]) -> None:
    """Refuses to capture a forward whole that puts buffers in place of others, which cannot hold them.

    Args:
        buffers: as the code would write them.

    Raises:
        GraphBreakError: names them.
    """
    if buffers:
        raise GraphBreakError(
            f"the forward puts another buffer in place of {', '.join(buffers)}",
            why="it has another shape or type, or is a tensor that the model holds elsewhere as well; a "
            "captured step would go on with the old one",
            do="write into the buffer: self.buffer.copy_(...), or mul_ and add_",
        )


def check_assigned_data(graph: fx.GraphModule, gathered: Any = None) -> None:
    """Refuses a graph of dynamo's that puts other data into tensors of the model.

    Args:
        gathered: the operator that gives it a parameter, graph by graph.

    Raises:
        CaptureError: with the line.
    """
    trace = assigned_data(graph)
    if trace is None and gathered is not None:
        trace = assigns_behind(graph, gathered)
    if trace is not None:
        raise CaptureError(
            "the forward assigns to the .data of a tensor of the model's",
            where=line_in(trace) or trace.strip(),
            why="a program writes what a tensor holds, and never takes another tensor in its place",
            do="write into it instead: self.buffer.copy_(...), or mul_ and add_; parameters are changed "
            "by the optimizer, or between steps under torch.no_grad()",
        )


def operator_error(error: Exception) -> CaptureError | None:
    """What an operator that is not torch's lacks, where that is what an error is about."""
    operator, lacking = custom_operators.lacks(error)
    if not operator or not own.is_own(operator):
        return None
    if lacking == "formula":
        return CaptureError(
            f"{operator} has no autograd formula, and the step needs its gradient",
            do="register one with torch.library.register_autograd",
        )
    return CaptureError(
        f"{operator} has no fake implementation, and a step is captured on fake tensors",
        do="register one with torch.library.register_fake, or what computes it on the host with "
        f"stepgraph.register_operator({operator}, host=...)",
    )


def drawn_number(error: AssertionError) -> CaptureError | None:
    """What says that code draws numbers from a generator of Python's own, which is an input to dynamo."""
    if "additional input" not in str(error) or "RandomValueSource" not in str(error):
        return None
    return CaptureError(
        "the code draws a number from a generator that Python has (random.Random)",
        where=line_of(error),
        why="a captured step would draw the same number for ever, and torch's graphs of it fail",
        do="draw it with torch.rand, or elsewhere, and hand it over as a tensor in the batch",
    )


def double_backward_error(error: Exception) -> CaptureError | None:
    """What says that a graph of many cannot be differentiated twice, where an error is about that."""
    if "does not currently support double backward" not in str(error):
        return None
    return CaptureError(
        "the loss has a gradient of a gradient in it (create_graph=True), and is captured graph by graph",
        why="what is compiled between two graph breaks can be differentiated once",
        do="remove the graph break (captured whole, torch.autograd.grad is part of the program), or use "
        "torch.func.grad",
    )


def own_function_error(model: nn.Module) -> CaptureError:
    """A gradient of a gradient, in code with an ``autograd.Function`` in it."""
    return CaptureError(
        "a torch.autograd.Function is differentiated twice (torch.autograd.grad with create_graph=True)",
        where=type(model).__qualname__,
        why="its backward is captured without a gradient of its own",
        do="write the function with operations that torch differentiates, or take the gradient by hand",
    )


def graph_break_error(error: Exception) -> CaptureError:
    """The line of the user's code that dynamo could not capture, and why."""
    if (lacking := operator_error(error)) is not None:
        return lacking
    if "does not require grad and does not have a grad_fn" in str(error):
        return CaptureError(
            "code asks for gradients (torch.autograd.grad) of what has none",
            where=line_of(error),
            why="an evaluation computes none, unless the code says so",
            do="put the code under torch.enable_grad()",
        )
    return GraphBreakError(
        "the model cannot be captured as one program",
        where=line_of(error),
        why=first_paragraph(str(error)),
        do="make the branch a torch.where (or torch.cond), move prints and .item() out of forward",
    )


def line_of(error: BaseException) -> str | None:
    """The innermost line of code that is neither torch's nor ours, where an error came from."""
    frames = getattr(error, "real_stack", None)
    if not frames:
        if (line := line_in(str(error))) is not None:
            return line
        frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(_NOT_USERS):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return None


def line_in(text: str) -> str | None:
    """The last line in the text of a traceback that is neither torch's nor ours."""
    for frame in reversed(list(_USER_FRAME.finditer(text))):
        if not frame["file"].startswith(_NOT_USERS):
            return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return None


def first_paragraph(text: str) -> str:
    """What a message of torch's says, without where it happened and how to hear more."""
    kept = []
    for line in text.strip().splitlines():
        if not line.strip() or line.startswith(("from user code", "Set TORCH", "Developer debug")):
            break
        kept.append(line.strip())
    return " ".join(kept)[:600]
