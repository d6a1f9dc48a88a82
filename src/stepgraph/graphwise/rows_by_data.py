"""Rows that the data selects (``h[mask]``, ``nonzero``): each rank has another number of them.

What is compiled is compiled for fixed sizes, so that each rank would compile on its own, run other programs
than the others, and sooner or later wait for them in a collective that they do not come to. From where such
rows are met the model runs as it stands, on all ranks: parameters are gathered where it reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepgraph.runtime.watch import Watch
from stepgraph.torch_internals import graphs as dynamo

AS_IT_STANDS = (
    "rows are selected by data (h[mask], nonzero), of which ranks have different numbers: the model runs "
    "as it stands from there on, not compiled, its random operations torch's own"
)


class RowsByData:
    """Whether the model was found to select rows by data.

    Args:
        ranks: how many; one rank alone may compile what it likes.
        watch: tells whether other ranks read the same parameters.
        report: takes notes.
    """

    def __init__(
        self, ranks: int, watch: Watch | None, report: Callable[[list[str]], None]
    ) -> None:
        self._ranks, self._watch, self._report = ranks, watch, report
        self._before = dynamo.graphs_ended(dynamo.BY_SIZES)
        self.found = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While the model runs."""
        self._before = dynamo.graphs_ended(dynamo.BY_SIZES)
        try:
            yield
        finally:
            self.find(self.met())

    def met(self) -> bool:
        """Whether that is so by now."""
        now = dynamo.graphs_ended(dynamo.BY_SIZES) != self._before
        return self.found or (self._ranks > 1 and now)

    def find(self, found: bool = True) -> None:
        """It is found; said once."""
        if found and not self.found:
            self.found = True
            self._report([AS_IT_STANDS])

    def as_it_stands(self, graph: torch.fx.GraphModule) -> Callable:
        """What runs a graph of dynamo's without compiling it."""
        watch = self._watch
        if watch is None:
            return graph.forward
        targets = (node.target for node in graph.graph.nodes if node.op != "placeholder")
        names = [str(getattr(target, "__name__", target)) for target in targets]
        digest = zlib.crc32(repr(names).encode())

        def run(*inputs: Any) -> Any:
            with watch.running(digest):
                return graph.forward(*inputs)

        return run

    def reads(self, name: str) -> None:
        """Code that is not compiled reads a parameter: on every rank, or on none."""
        if self._watch is not None:
            self._watch.runs(zlib.crc32(name.encode()))
