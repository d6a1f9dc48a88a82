"""Records what graphs are run on, and every pass on them: one uncompiled run, graph by graph."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from stepgraph import torch_internals
from stepgraph.capture.decompositions import decomposition_table
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.program.driver import PassDriver
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import Pass, Rewrite
from stepgraph.torch_internals import graphs as dynamo


class _Seen(Exception):
    """A graph's passes have been observed: nothing has to be compiled."""


@dataclass
class GraphRecord:
    """One graph: its passes as they ran, and what one call of it was given.

    ``passes`` are (pass, before, after, arguments); ``inputs`` its own, ``tangents`` by result.
    """

    passes: list[tuple[Pass, Program, Program, Mapping[str, Any]]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    tangents: dict[int, torch.Tensor] = field(default_factory=dict)

    def local_inputs(self) -> list[torch.Tensor]:
        """This rank's tensors for the placeholders that the first pass met."""
        program = self.passes[0][1]
        return [self._local(node) for node in program.placeholders]

    def _local(self, node: fx.Node) -> torch.Tensor:
        value = meta(node)["val"]
        match torch_internals.describe(meta(node)["desc"]):
            case ("plain", index):
                given = self.inputs[index]
                given = given.to_local() if isinstance(given, DTensor) else given
                if isinstance(given, torch.Tensor):
                    return given.detach()
            case ("tangent", ("output", index)) if index in self.tangents:
                return self.tangents[index].detach()
        made = isinstance(value, torch.Tensor)
        return torch.zeros(value.shape, dtype=value.dtype) if made else torch.zeros(())


@dataclass
class Recorder:
    """A backend for dynamo that runs each graph as it stands, and records it.

    Args:
        graphs: decides for each graph, and applies it, under an observing driver.
        replaced: rewritings to run in place of passes', by name.
    """

    graphs: GraphCompiler
    replaced: dict[str, Rewrite] = field(default_factory=dict)
    records: list[GraphRecord] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable:
        """The graph itself, between records of what goes in and what comes back."""
        record = GraphRecord()
        known_results, written = self._observe(graph, examples, record)
        self.records.append(record)

        def run(*inputs: Any) -> Any:
            record.inputs = [x.detach().clone() if _is_plain(x) else x for x in inputs]
            results = graph(*inputs)
            for index, result in enumerate(results):
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    result.register_hook(functools.partial(_keep, record.tangents, index))
            known = self.graphs.known
            for index in written:
                known.forget(inputs[index])
            known.update((results[i], how) for i, how in known_results.items() if i < len(results))
            return results

        return run

    def _observe(
        self, graph: fx.GraphModule, examples: Sequence[Any], record: GraphRecord
    ) -> tuple[dict[int, Any], list[int]]:
        """Runs the passes on a graph's forward and backward; how ranks have its results then."""
        sources = dynamo.input_sources(graph)
        places = [
            i
            for i, x in enumerate(examples)
            if isinstance(x, torch.Tensor) and not isinstance(x, Parameter)
        ]
        known, rows = self.graphs.known_of(examples, places), self.graphs.rows
        self.graphs.driver = PassDriver(
            invariants=True, observe=lambda *row: record.passes.append(row), replaced=self.replaced
        )
        found: list[Any] = []

        def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any):
            found.append(self.graphs.rewrite(joint, num_fwd_outputs, sources, rows, known))
            raise _Seen

        def alone(traced: fx.GraphModule, inputs: Any):
            results = len(traced.graph.output_node().args[0])  # type: ignore[arg-type]
            return partition(traced, inputs, num_fwd_outputs=results)

        with contextlib.suppress(_Seen):
            dynamo.differentiate_and_compile(
                graph, examples, partition, partition, alone, decomposition_table()
            )
        (sums,) = found
        return dict(sums.results), list(sums.written)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _keep(tangents: dict[int, torch.Tensor], index: int, gradient: torch.Tensor) -> None:
    tangents[index] = gradient.detach().clone()
