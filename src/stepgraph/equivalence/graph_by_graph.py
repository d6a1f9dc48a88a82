"""Checks every pass of a module that runs graph by graph: each graph before and after it, on all ranks.

One uncompiled run records what each rank's graphs are given. Each rank then interprets its own, and they
exchange values where its collectives stand.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import torch_internals
from stepgraph.equivalence.comparing import CheckReport, compare
from stepgraph.equivalence.lockstep import Observer, compute_collective, run_rank
from stepgraph.equivalence.recording import GraphRecord, Recorder
from stepgraph.errors import InvariantError
from stepgraph.graphwise.graph_breaks import GraphRunner
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.lowering.passes.name_mesh_dims import name_mesh_dims
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import Results, Rewrite
from stepgraph.runtime.batches import LocalBatch
from stepgraph.torch_internals import graphs as dynamo


class RankValues:
    """What this rank's graph is run on, with all ranks' values at each collective. References ask it.

    Args:
        inputs: this rank's, by role.
        groups: its process groups by mesh dimension; none where it is alone.
    """

    torch_seed = 0

    def __init__(
        self, inputs: Mapping[str, torch.Tensor], rank: int, groups: Mapping[str, str]
    ) -> None:
        self.inputs, self.rank, self.groups = inputs, rank, groups

    def execute(
        self,
        program: Program,
        replaced: Mapping[str, Any] | None = None,
        inputs: Results | None = None,
        observe: Observer | None = None,
    ) -> dict[Any, torch.Tensor]:
        """This rank's results by role.

        Args:
            replaced, observe: as for :func:`run_lockstep`.
            inputs: by role, in place of those that were recorded.
        """
        program = name_mesh_dims.rewrite(program.copy(), self.groups)
        row = list((dict(self.given(program)) | dict(inputs or {})).values())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.torch_seed)
            found = run_rank(program, self.rank, row, self._exchange, observe, replaced)
        return dict(zip(program.outputs, found, strict=True))

    def inside(self, program: Program, names: Any) -> tuple[Results, dict[str, torch.Tensor]]:
        """:meth:`execute`, and the values of some inputs and operations by name."""
        rows = zip(program.placeholders, self.given(program).values(), strict=True)
        seen = {meta(n)["name"]: value for n, value in rows if meta(n)["name"] in names}

        def observe(rank: int, node: Any, value: Any) -> None:
            if meta(node).get("name") in names:
                seen[meta(node)["name"]] = value

        return self.execute(program, observe=observe), seen

    def given(self, program: Program) -> Results:
        """This rank's inputs by role; a pass may have added a seed."""
        made = self.inputs | {roles.label(roles.Seed()): torch.tensor([5, 3, 0])}
        return {role: made[roles.label(role)].clone() for role in program.inputs}

    def on_all_ranks(self, value: Any) -> list[Any]:
        """What every rank brings."""
        if not self.groups:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone

    def _exchange(self, node: Any, value: torch.Tensor, mesh: MeshShape) -> Any:
        values = self.on_all_ranks(value)
        return compute_collective([node] * len(values), values, mesh)[self.rank]


def check_graphs(
    runner: GraphRunner, batch: LocalBatch, replaced: Mapping[str, Rewrite] | None = None
) -> CheckReport:
    """Checks every pass of every graph that one forward and backward of a batch goes through.

    All ranks call it, each with its own part of the batch. Parameters, gradients, buffers and generators
    are as before.

    Args:
        replaced: rewritings to run in place of passes', by name (to plant a bug).
    """
    compiler = runner.compiler
    ranks = compiler.ranks
    graphs = GraphCompiler(runner.graphs.request, ranks.target, ranks.rank, ranks.groups)
    recorder = Recorder(graphs, dict(replaced or {}))
    report = CheckReport()
    try:
        runner.record(recorder, batch.leaves, batch.tree)
    except (InvariantError, torch_internals.DynamoError) as error:
        inner = dynamo.inner_error(error)
        if not isinstance(inner, InvariantError):
            raise
        # A pass's result cannot even be run.
        report.fail(graphs.driver.runs[-1].name, "graph", inner.what)
        return report
    for number, record in enumerate(recorder.records):
        _check(report, f"graph {number}", record, ranks.rank, ranks.groups)
    return report


def _check(
    report: CheckReport, name: str, record: GraphRecord, rank: int, groups: Mapping[str, str]
) -> None:
    first = record.passes[0][1]
    labels = map(roles.label, first.inputs)
    values = RankValues(dict(zip(labels, record.local_inputs(), strict=True)), rank, groups)
    for step, before, after, arguments in record.passes:
        if not report.ok:
            return
        try:
            if step.reference is None:
                old: Results | None = values.execute(before)
            else:
                old = step.reference(values, before, after, **arguments)
            new = values.execute(after)
        except AssertionError as error:
            report.fail(step.name, name, str(error))
            return
        compare(report, name, step.name, step.preserves, old, new)
        everyone = values.on_all_ranks(report.passes.pop())
        report.passes.append(max(everyone, key=lambda check: (not check.ok, check.difference)))
