"""Every error that stepgraph raises, in one place.

A message says what happened, where (module path, operation, source line), why, and what to do. The
docstring of a class is its entry in the error reference; ``anchor`` is the address of that entry.
"""

import difflib
import functools
from collections.abc import Iterable, Sequence


class StepgraphError(Exception):
    """Base of all errors raised on purpose by stepgraph.

    Args:
        what: one sentence, what went wrong.
        where: the place: a module path, a value's stable name, a source line.
        why: the reason, where it is not obvious.
        do: what the reader can do about it.
    """

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.do = what, where, why, do
        labelled = (("where", where), ("why", why), ("what to do", do))
        lines = [what] + [f"  {label}: {text}" for label, text in labelled if text]
        super().__init__("\n".join([*lines, f"  see: {self.anchor()}"]))

    def __reduce__(self):
        # The default would call the class with the formatted message only; errors travel between
        # processes when a rank fails.
        made = functools.partial(type(self), where=self.where, why=self.why, do=self.do)
        return (made, (self.what,), self.__dict__)

    @classmethod
    def anchor(cls) -> str:
        """The documentation anchor of this error class."""
        return f"docs/errors.md#{cls.__name__.lower()}"


def near_misses(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? known: a, b, c`` for an unknown word."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def name_a_few(names: Sequence[str], at_most: int = 5) -> str:
    """``a, b, c and 7 more``."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


class UsageError(StepgraphError, ValueError):
    """An argument that cannot be used: an unknown preset, policy, lowering or model name."""


class MeshError(UsageError):
    """A mesh that does not parse, lacks a dimension a preset needs, or does not match the ranks."""


class BatchError(UsageError):
    """A batch that does not divide, is not made of tensors, or holds an index out of range."""


class ShapeLimitError(BatchError):
    """More distinct batch shapes than the engine keeps compiled programs for."""


class LossError(UsageError):
    """The loss callable did not return a floating-point scalar tensor first."""


class OptimizerError(UsageError):
    """An optimizer that does not belong to the model, or cannot be made functional."""


class FrozenNumberError(OptimizerError):
    """A number of a parameter group changed, which the compiled step had to treat as a constant."""


class CaptureError(StepgraphError):
    """The training step could not be captured as one program."""


class GraphBreakError(CaptureError):
    """The model's Python code cannot be captured whole; the message names the line."""


class ChangingValueError(CaptureError):
    """A value that the model's code reads from Python is another one again and again."""


class RandomOperationError(CaptureError):
    """A random operation that has no version keyed by (seed, step, operation)."""


class HookError(CaptureError):
    """A gradient hook that the captured program would silently drop."""


class ParameterHookError(HookError):
    """A hook on a parameter's gradient: the model is run graph by graph, not as one program."""


class RanksDifferError(StepgraphError):
    """The ranks do not do the same."""


class UnfilledModelError(StepgraphError):
    """A model on the meta device whose parameters were never given values."""


class StrictError(StepgraphError):
    """A fallback that would have been reported, under ``strict=True``."""


class InvariantError(StepgraphError):
    """A Program violates an invariant after a pass: a bug in that pass."""


class PlanError(StepgraphError):
    """A plan file that is malformed, too large, or made for another model."""


class BudgetError(PlanError):
    """No plan fits the memory budget; the message has the smallest peak, and what takes the most.

    ``least``: bytes that what a solver counts takes at least, where it is the solver that says so.
    ``smallest``: bytes of the smallest peak that can be had, where it was searched for.
    """

    least: int | None = None
    smallest: int | None = None


class MemoryPolicyError(UsageError):
    """A memory policy that the captured program, or this machine's memory, cannot follow."""


class LoweringError(StepgraphError):
    """A program cannot be executed as it was asked for.

    No lowering can on this device (the message has each one's first obstacle), or a CUDA graph of it cannot
    be captured, or replayed where something is not where it was.
    """


class RecompilationError(StepgraphError):
    """A compilation past warm-up inside :func:`stepgraph.no_recompiles`."""


class CheckpointError(StepgraphError):
    """A checkpoint or state dict that is damaged, does not fit, or could not be written.

    What was complete before stays as it is; nothing of a damaged one is loaded.
    """


class LaunchError(StepgraphError):
    """A launched rank failed; the message is the first error of the first rank that failed."""
