"""Kernels that draw from the device's generator, in a graph: each call has a generator of its own.

A graph reads seed and offset of the generators that are registered with it when it is replayed. One that
all calls shared would stand elsewhere for a dropout that is recomputed; so each call is captured with its
own, which is seeded before each replay as the call would seed the device's: the bits are the same.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

LIMIT = 2**63


class Draws:
    """The draws of one graph.

    Attributes:
        numbers: what each call is seeded by, less the step's seed.
        generators: one for each, once it is captured.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.generators: list[Any] = []
        self._seed, self._next, self._captures = 0, 0, False

    @contextlib.contextmanager
    def warming(self, seed: int) -> Iterator[None]:
        """Within it calls draw as ever, and are counted."""
        self.numbers, self._seed, self._captures = [], seed, False
        with _entered(self):
            yield

    @contextlib.contextmanager
    def capturing(self, make: Callable[[], Any]) -> Iterator[None]:
        """Within it each call draws from a generator of its own; ``make`` makes one.

        They are made, and there to be registered, before the body runs.
        """
        self.generators = [make() for _ in self.numbers]
        self._next, self._captures = 0, True
        with _entered(self):
            yield

    def seed(self, seed: int) -> None:
        """Before a replay: ``seed`` is the step's."""
        for generator, number in zip(self.generators, self.numbers, strict=True):
            generator.manual_seed((seed + number) % LIMIT)

    @contextlib.contextmanager
    def one(self, generator: Any, number: int) -> Iterator[None]:
        """One call."""
        if not self._captures:
            self.numbers.append(number - self._seed)
            with _seeded(generator, number):
                yield
            return
        own = self.generators[self._next]
        self._next += 1
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(own)
        try:
            yield
        finally:
            generator.graphsafe_set_state(before)


_current: ContextVar[Draws | None] = ContextVar("_current", default=None)


@contextlib.contextmanager
def _entered(draws: Draws) -> Iterator[None]:
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _seeded(generator: Any, number: int) -> Iterator[None]:
    before = generator.get_state()
    generator.manual_seed(number)
    try:
        yield
    finally:
        generator.set_state(before)


@contextlib.contextmanager
def drawing(generator: Any, number: int) -> Iterator[None]:
    """Within it a kernel that draws from a generator draws by a number, whether or not it is captured."""
    draws = _current.get()
    with _seeded(generator, number) if draws is None else draws.one(generator, number):
        yield
