"""Each attention becomes the kernel that its target has for it."""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.attention import EFFICIENT, FLASH, HOST, PLAIN, Kernel
from stepgraph.operators import flex
from stepgraph.operators.attention import (
    ATTENTION,
    ATTENTION_BIAS_BACKWARD,
    BACKWARDS,
    Call,
    probabilities,
    rows_first,
)
from stepgraph.operators.flex import FLEX, FLEX_BACKWARD, FLEXES
from stepgraph.operators.views import is_view
from stepgraph.planning.target import Target
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program
from stepgraph.program.randomness import RANDOM, RANKS_APART
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten
KERNELS = (HOST, FLASH, EFFICIENT, PLAIN)  # best first
DRAWN_INSIDE = (
    "attention dropout is drawn inside the fused kernel: the same at every run, recomputed and resumed, "
    "but not on another mesh (strict=True spells it out)"
)
QUADRATIC = "no fused kernel of this device computes the attention of {}: it holds all scores"


@program_pass(
    reads="``attention`` and its backward, their shapes and types; the target",
    writes="the operators of a fused kernel, or arithmetic, in their place",
    preserves=SUMMATION,
)
def choose_attention_kernels(
    program: Program, target: Target, strict: bool = False, rank: int = 0
) -> Program:
    """Chooses a kernel for each attention, and lets its backward read what that kernel saves.

    Args:
        target: where the program is executed.
        strict: dropout is drawn the same on every mesh, whatever it costs.
        rank: ranks of a graph that draws its own seed draw other ones.
    """
    calls = [node for node in program.operations() if node.target is ATTENTION]
    seed: fx.Node | None = None
    done: set[fx.Node] = set()
    host = torch_internals.host_device().type
    for node in calls:
        backwards = list(_backwards_of(node))
        call = Call(*node.args)  # type: ignore[arg-type]
        done.update(backwards)
        learns = any(late.target is ATTENTION_BIAS_BACKWARD for late in backwards)
        draw = _draw_of(call.keep)
        may_draw = not strict and draw is not None
        kernel = _first_that_can(_values(call), learns, target.device_type, may_draw)
        key = None
        if call.keep is not None and kernel.draws:
            assert draw is not None
            seed = seed or _host_seed(program, rank)
            key = (seed, _number(draw))
            call = call._replace(keep=None)
            program.note(DRAWN_INSIDE)
        if kernel.quadratic and target.device_type != host:
            program.note(QUADRATIC.format(meta(node)["module"] or meta(node)["name"]))
        _replace(program, node, backwards, kernel, call, key)
    for late in [n for n in program.operations() if n.target in BACKWARDS and n not in done]:
        shares = _emitter(program, late).spell(probabilities, _call_of(late))
        _replace_backward(program, late, PLAIN, _call_of(late), (shares,))
    for node in [n for n in program.operations() if n.target in FLEXES]:
        _spell_out_flex(program, node, target)
    return program.finish()


def _first_that_can(call: Call, learns: bool, device_type: str, may_draw: bool) -> Kernel:
    """The first kernel of a kind of device that can compute a call.

    Args:
        call: its tensors' shapes, types and strides.
        learns: a gradient of the mask is asked for.
        may_draw: a kernel may draw a dropout itself, keyed.
    """
    for kernel in KERNELS:
        here = kernel.device_type in ("", device_type)
        drawn = call.keep is None or may_draw or not kernel.draws
        if here and drawn and not kernel.refuses(call, learns):
            return kernel
    raise AssertionError("plain arithmetic refuses nothing")


def _spell_out_flex(program: Program, node: fx.Node, target: Target) -> None:
    """One that no kernel of the target computes; a backward so spelt reads nothing of its forward."""
    call, values = flex.call_of(node), flex.values_of(node)
    learned = node.args[-1] if node.target is FLEX_BACKWARD else ()
    on_host = target.device_type == torch_internals.host_device().type
    if not on_host and not flex.kernel_refuses(values, learned):  # type: ignore[arg-type]
        return
    emit = _emitter(program, node)
    if node.target is FLEX:
        _give(emit, node, emit.spell(flex.plain_result, call, on_host=True))
    else:
        found = emit.spell(flex.plain_gradients, call, node.args[0], node.args[-1], on_host=True)
        _give(emit, node, found)
    if not on_host:
        program.note(QUADRATIC.format(meta(node)["module"] or meta(node)["name"]))


def _values(call: Call) -> Call:
    return Call(*(meta(x)["val"] if isinstance(x, fx.Node) else x for x in call))  # type: ignore[arg-type]


def _result(node: fx.Node, index: int) -> list[fx.Node]:
    return [user for user in node.users if user.args[1] == index]


def _backwards_of(node: fx.Node) -> Iterator[fx.Node]:
    """The backwards that read the sums of this attention."""
    waiting = _result(node, 1)
    while waiting:
        for user in waiting.pop().users:
            if user.target in BACKWARDS:
                yield user
            elif is_view(user):
                waiting.append(user)


def _replace(
    program: Program,
    node: fx.Node,
    backwards: list[fx.Node],
    kernel: Kernel,
    call: Call,
    key: tuple | None,
) -> None:
    emit = _emitter(program, node)
    result, saved = emit.spell(kernel.forward, call, key)
    for late in backwards:
        # The backward's own arguments: those of the forward may be recomputed, or gathered again.
        mine = _call_of(late)._replace(keep=call.keep)
        _replace_backward(program, late, kernel, mine, saved)
    _give(emit, node, [result])


def _replace_backward(
    program: Program, late: fx.Node, kernel: Kernel, call: Call, saved: tuple
) -> None:
    learns = late.target is ATTENTION_BIAS_BACKWARD
    emit = _emitter(program, late)
    found = emit.spell(kernel.backward, call, saved, late.args[6], late.args[0], learns)
    _give(emit, late, found)


def _give(emit: Builder, node: fx.Node, found: Sequence[fx.Node]) -> None:
    """Puts results in the place of those of ``node``, laid out as it promised."""
    for index, value in enumerate(found):
        for user in _result(node, index):
            if meta(value)["val"].stride() != meta(user)["val"].stride():
                value = emit.spell(rows_first, value)
            user.replace_all_uses_with(value)


def _call_of(late: fx.Node) -> Call:
    """The attention that a backward is of, by its own arguments."""
    return Call(*late.args[1:6], *late.args[8:])  # type: ignore[arg-type]


def _emitter(program: Program, node: fx.Node) -> Builder:
    emit = Builder(program, meta(node)["phase"], node)
    emit.module = meta(node)["module"]
    return emit


def _draw_of(keep: object) -> fx.Node | None:
    """The draw that says what is kept, through operations on it alone."""
    while isinstance(keep, fx.Node) and keep.target is not RANDOM:
        keep = keep.all_input_nodes[0] if len(keep.all_input_nodes) == 1 else None
    return keep if isinstance(keep, fx.Node) else None


def _number(draw: fx.Node) -> int:
    """A number of an operation and of the part of it that this rank draws."""
    _, _, operation, _, _, starts, rows, _ = draw.args
    return zlib.crc32(repr((operation, list(starts), list(rows))).encode())  # type: ignore[arg-type]


def _host_seed(program: Program, rank: int) -> fx.Node:
    """A seed on the host: of the step; where a graph draws its own, out of the host's generator."""
    host = torch_internals.host_device()
    emit = Builder(program, FORWARD, next(program.operations()))
    if roles.Seed() in program.inputs:
        return emit.input(roles.HostSeed(), (), torch.int64, host)
    word = emit(aten.randint.low, 0, 2**62, [], dtype=torch.int64, device=host)
    return emit(aten.add.Scalar, word, rank * RANKS_APART)
