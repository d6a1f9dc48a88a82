"""The record of a pass: what it reads, writes and preserves, and what its result must be.

The driver, ``check``, bisect, the report and the page of passes read it; nothing else lists passes. Their
order stands in :mod:`stepgraph.pipeline`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stepgraph.program import roles
from stepgraph.program.program import Program

# A pass that only moves, copies or renames operations computes the same bits; one that adds up in another
# order, or whose reference is torch's own code, is held to summation error. Random bits that a pass makes
# its own are held to its reference.
BITWISE, SUMMATION, DISTRIBUTION = "bitwise", "summation order", "distribution"

Rewrite = Callable[..., Program]
Results = Mapping[Any, torch.Tensor]


class Values(Protocol):
    """What a reference may ask for: values to run programs on, and plain PyTorch on the same ones.

    ``torch_seed``: of torch's own generator, whenever a program is executed.
    """

    torch_seed: int

    def execute(
        self,
        program: Program,
        replaced: Mapping[str, Any] | None = None,
        inputs: Results | None = None,
    ) -> Results:
        """Global results of a Program by role.

        Args:
            replaced: by stable name: ``f(node, arguments, keywords) -> value`` in place of an operation.
            inputs: to run on in place of those that are given.
        """
        ...

    def inside(self, program: Program, names: Any) -> tuple[Results, Mapping[str, torch.Tensor]]:
        """:meth:`execute`, and the values of some operations by name."""
        ...

    def on_all_ranks(self, value: Any) -> list[Any]:
        """What every rank brings, where each checks its own part; else the value alone."""
        ...

    def given(self, program: Program) -> Results:
        """The global tensors of a Program's inputs by role."""
        ...

    def eager(self) -> Results:
        """Loss, gradients and buffers of plain PyTorch on the last micro-batch."""
        ...

    def whole_batch(self, exact: bool) -> Results:
        """Loss and gradients of plain PyTorch on the whole batch; not ``exact``: the mean over parts."""
        ...

    def accumulate(self) -> None:
        """Runs all micro-batches but the last on the program ``accumulate``, from nothing."""
        ...

    def clipped(self, gradients: Results) -> Results:
        """Gradients as ``torch.nn.utils.clip_grad_norm_`` leaves them."""
        ...

    def stepped(self, results: Results, program: Program) -> Results:
        """New parameters and states after a step of the user's own optimizer."""
        ...


# ``reference(values, before, after, **arguments of the pass) -> results by role``
# None: this program is none that it can say.
Reference = Callable[..., Results | None]


@dataclass(frozen=True)
class Pass:
    """One verb phrase: a rewriting of Programs.

    Attributes:
        rewrite: ``(program, **arguments) -> program``; it may rewrite in place. It is handed those of the
            road's arguments that it names.
        reads, writes: in words.
        preserves: one of the three above.
        reference: what results must be, where the pass gives them a new meaning; None: what they were.
        functional: the result is functional still.
    """

    rewrite: Rewrite
    reads: str
    writes: str
    preserves: str
    reference: Reference | None = None
    functional: bool = True
    takes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(inspect.signature(self.rewrite).parameters)[1:]
        told = {"takes": names, "__doc__": self.rewrite.__doc__}
        for name, value in (told | {"__module__": self.rewrite.__module__}).items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The verb phrase."""
        return self.rewrite.__name__

    def __call__(self, program: Program, *args: Any, **kwargs: Any) -> Program:
        """Applies it, without a driver."""
        return self.rewrite(program, *args, **kwargs)


def program_pass(
    *,
    reads: str,
    writes: str,
    preserves: str = BITWISE,
    reference: Reference | None = None,
    functional: bool = True,
) -> Callable[[Rewrite], Pass]:
    """Declares a function to be a pass; see :class:`Pass`."""

    def declare(rewrite: Rewrite) -> Pass:
        return Pass(rewrite, reads, writes, preserves, reference, functional)

    return declare


def without_buffers(results: Results) -> Results:
    """What a reference on another batch can say: buffers went through other updates."""
    return {role: v for role, v in results.items() if not isinstance(role, roles.NewBuffer)}
