"""Counting compilations where they happen, and making one past warm-up an error if asked."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stepgraph.errors import ChangingValueError, RecompilationError
from stepgraph.runtime.batches import LocalBatch
from stepgraph.runtime.compiled import Compiled


@dataclass
class Stats:
    """What an engine has done: steps run, compilations, and why it compiled again.

    ``recompiles`` holds one reason for each compilation after the first of its entry point; ``replans``
    what each ``engine.replan`` has come to.
    """

    steps: int = 0
    compiles: int = 0
    recompiles: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0
    replans: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def counting(self, reason: str | None) -> Iterator[None]:
        """One compilation; ``reason`` says why another was needed."""
        start = time.perf_counter()
        yield
        self.compiles += 1
        self.compile_seconds += time.perf_counter() - start
        if reason is not None:
            self.recompiles.append(reason)


# Of each block that is entered: how many calls are its warm-up, and the calls so far.
_guards: contextvars.ContextVar[tuple[tuple[int, Counter], ...]] = contextvars.ContextVar(
    "stepgraph_recompilation_guards", default=()
)


@contextlib.contextmanager
def no_recompiles(after: int = 2) -> Iterator[None]:
    """Inside, a compilation past warm-up raises, with its reason.

    Args:
        after: calls of each entry point (``step``, ``evaluate``) of each engine that are its warm-up.

    Raises:
        RecompilationError: from the call that would compile, before anything is compiled.
    """
    token = _guards.set((*_guards.get(), (after, Counter())))
    try:
        yield
    finally:
        _guards.reset(token)


def count_call(engine: object, entry: str) -> None:
    """Notes one call of an entry point."""
    for _, calls in _guards.get():
        calls[id(engine), entry] += 1


def before_compiling(engine: object, entry: str, reason: str) -> None:
    """Refuses a compilation that a :func:`no_recompiles` block forbids."""
    for after, calls in _guards.get():
        if calls[id(engine), entry] > after:
            raise RecompilationError(
                f"engine.{entry} compiles again at call {calls[id(engine), entry]}",
                why=reason,
                do="keep shapes, requires_grad and train/eval mode fixed after warm-up; "
                "stepgraph compiles once for each",
            )


def recompilation_reason(
    entry: str, known: Iterable[tuple], batch: LocalBatch, key: tuple, model: nn.Module
) -> str | None:
    """Why an entry point compiles again for ``key``; None where it never has.

    A key is (batch key, requires_grad flags, (train/eval modes, forward hooks, structure)).
    """
    known = list(known)
    if not known:
        return None
    last = known[-1]
    if key[0] != last[0] and all(key[0] != k[0] for k in known):
        return f"{entry}: new batch shape: {batch.shapes()}"
    if key[1] != last[1]:
        names = [name for name, _ in model.named_parameters()]
        changed = [n for n, a, b in zip(names, key[1], last[1], strict=True) if a != b]
        return f"{entry}: requires_grad changed: {', '.join(changed[:5])}"
    if key[2][2] != last[2][2]:
        return f"{entry}: modules were moved, added or removed"
    return f"{entry}: train/eval mode or forward hooks changed"


def changed_value(name: str, compiled: Sequence[Compiled], at_most: int) -> str:
    """Which of the values that the code reads is another one than in all that was compiled.

    Args:
        name: of the entry point; the model is as it is captured.
        compiled: so far, for one kind of batch, ``at_most`` so many.

    Raises:
        ChangingValueError: it was another one too often.
    """
    found = [one.values.broken() for one in compiled]
    if len(compiled) < at_most:
        return f"{name}: a value that the code reads has changed: no longer {found[-1]}"
    raise ChangingValueError(
        "a value that the model's code reads from Python changes again and again",
        where=f"engine.{name}, compiled {len(compiled)} times: {'; '.join(dict.fromkeys(found))}",
        why="a program holds it as a constant, so each value is another program",
        do="make it a buffer (register_buffer) and change it in place, or pass it as a tensor in the "
        "batch: both are inputs of the program. For a few more values: a larger max_shapes",
    )
