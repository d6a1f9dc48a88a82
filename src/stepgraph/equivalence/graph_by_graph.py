"""Checks every pass of a module that runs graph by graph: each graph before and after it, on all ranks.

One uncompiled run records what each rank's graphs are given; the ranks exchange that, and each runs the
graphs of all of them in lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.equivalence.comparing import CheckReport, compare
from stepgraph.equivalence.lockstep import run_lockstep
from stepgraph.equivalence.recording import GraphRecord, Recorder
from stepgraph.errors import InvariantError
from stepgraph.graphwise.compiler import GraphCompiler
from stepgraph.graphwise.runner import GraphRunner
from stepgraph.lowering.passes.name_mesh_dims import name_mesh_dims
from stepgraph.program import roles
from stepgraph.program.program import Program
from stepgraph.program.record import Results, Rewrite
from stepgraph.runtime.batches import LocalBatch


class RankValues:
    """What all ranks' graphs are run on: results by rank and role. References ask it."""

    torch_seed = 0

    def __init__(self, inputs: Sequence[Sequence[torch.Tensor]], groups: Mapping[str, str]) -> None:
        self.inputs, self.groups, self.ranks = inputs, groups, len(inputs)

    def execute(
        self,
        program: Program,
        replaced: Mapping[str, Any] | None = None,
        inputs: Results | None = None,
    ) -> dict[Any, torch.Tensor]:
        """Every rank's results.

        Args:
            replaced: as for :func:`run_lockstep`.
            inputs: by role, or by (rank, role), in place of those that were recorded.
        """
        rows = [self._row(program, rank, inputs or {}) for rank in range(len(self.inputs))]
        program = name_mesh_dims.rewrite(program.copy(), self.groups)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.torch_seed)
            found = run_lockstep(program, rows, None, replaced)
        return {
            (rank, role): value
            for rank, results in enumerate(found)
            for role, value in zip(program.outputs, results, strict=True)
        }

    def inside(
        self, program: Program, names: Any
    ) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
        """:meth:`execute`, and the values of some nodes by (rank, name)."""
        seen: dict[Any, torch.Tensor] = {}

        def observe(rank: int, node: Any, value: Any) -> None:
            if node.meta.get("name") in names:
                seen[rank, node.meta["name"]] = value

        rows = [self._row(program, rank, {}) for rank in range(len(self.inputs))]
        for rank, row in enumerate(rows):
            for node, value in zip(program.placeholders, row, strict=True):
                observe(rank, node, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.torch_seed)
            run_lockstep(program, rows, observe)
        return {}, seen

    def given(self, program: Program) -> Results:
        """The first rank's inputs by role."""
        return dict(zip(program.inputs, self._row(program, 0, {}), strict=True))

    def _row(self, program: Program, rank: int, other: Results) -> list[torch.Tensor]:
        """One rank's inputs: a pass may have added a seed, or dropped an input."""
        recorded = dict(zip(self.names, self.inputs[rank], strict=True))
        made = {roles.label(roles.Seed()): torch.tensor([5, 3, 0])}
        rows = []
        for role in program.inputs:
            label = roles.label(role)
            value = other.get((rank, role), other.get(role))
            value = recorded.get(label, made.get(label)) if value is None else value
            assert value is not None, f"{label} was not recorded"
            rows.append(value.clone())
        return rows

    names: Sequence[str] = ()


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
    except InvariantError as error:  # a pass's result cannot even be run
        name = str(error).split(":")[0].removeprefix("after ")
        report.fail(name, "graph", str(error).splitlines()[0])
        return report
    for number, record in enumerate(recorder.records):
        _check(report, f"graph {number}", record, ranks.groups)
    return report


def _check(report: CheckReport, name: str, record: GraphRecord, groups: Mapping[str, str]) -> None:
    mine = record.local_inputs()
    everyone: list[Any] = [mine]
    if groups:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    values = RankValues(everyone, groups)
    values.names = [roles.label(role) for role in record.passes[0][1].inputs]
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
