"""``torch.compile(..., backend="stepgraph")``: one graph after another, each a joint Program.

dynamo captures what lies between two graph breaks; AOTAutograd traces its forward and backward as one.
Placement and memory are applied there, before the two are parted, so that the backward which autograd
(or compiled autograd) later runs holds its collectives already. Whether a graph has a backward is
AOTAutograd's finding, kept with the graph; what waits for a backward is kept by autograd alone.
"""

import functools
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.nn import Parameter

from stepgraph.analysis.rows import NOTHING_GIVEN, Given
from stepgraph.analysis.sums import Sums, decide_sums
from stepgraph.capture.canonical import canonicalise
from stepgraph.capture.decompositions import decomposition_table
from stepgraph.capture.mixed_types import check_types
from stepgraph.errors import CaptureError
from stepgraph.graphwise.graph import GraphProgram
from stepgraph.graphwise.known import Known
from stepgraph.graphwise.lower import lower_graph
from stepgraph.lowering.decide import decide_for_graph as decide_lowering
from stepgraph.memory import apply as memory
from stepgraph.memory.decide import decide_for_graph
from stepgraph.pipeline import (
    BOUND,
    GRAPH_CAPTURED,
    GRAPH_LOWERED,
    GRAPH_PLACED,
    GRAPH_SUMMED,
    GRAPH_TARGETED,
    REMEMBERED,
    SCHEDULED,
)
from stepgraph.placement.presets.named import gathers_again
from stepgraph.planning.decisions import Decisions, LoweringDecision, PlacementDecision
from stepgraph.planning.request import Request
from stepgraph.planning.target import Target
from stepgraph.program.digest import digest_of_graph
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import Spread
from stepgraph.program.markers import UNSHARD
from stepgraph.program.program import Program
from stepgraph.runtime.watch import Watch
from stepgraph.schedule import apply as schedule
from stepgraph.torch_internals import graphs as dynamo
from stepgraph.torch_internals.bases import detach_views, with_bases
from stepgraph.torch_internals.python_values import numbers_given

OTHER_INPUTS = (
    "graphs: one is run with rows of the batch where it was compiled for none, or the other way: "
    "what it adds up may be too much, or each data-parallel rank's own"
)


@dataclass
class GraphCompiler:
    """Compiles the graphs of one module, one request for all.

    Attributes:
        request: names the policies, for every graph.
        target: what they run on.
        rank, groups: where this process stands, and its process groups by mesh dimension.
        driver: of the passes.
        rows: of this rank's batch now, by which a graph's inputs are told to be rows of it.
        programs: of the graphs so far, as this rank runs them, in the order they were captured.
        decided: for each of them.
        known: how ranks have the batch's tensors and what graphs made, as far as it is known.
        evaluates: what runs now is an evaluation.
        guessed: a graph was compiled for what is taken for rows by its shape: code between graphs made it.
        watch: tells whether other ranks run the same graphs.
    """

    request: Request
    target: Target
    rank: int = 0
    groups: Mapping[str, str] = field(default_factory=dict)
    driver: PassDriver = field(default_factory=PassDriver)
    rows: int = 0
    programs: list[Program] = field(default_factory=list)
    decided: list[Decisions] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    evaluates: bool = False
    guessed: bool = False
    watch: Watch | None = None

    def __call__(
        self, graph: fx.GraphModule, examples: Sequence[Any], backward: bool = False
    ) -> Callable:
        """A backend, as ``torch.compile`` calls one.

        Args:
            backward: what compiled autograd captured; losses are none of its results.
        """
        rows = 0 if backward else self.rows
        if dynamo.has_symbols(graph):
            self.note("a graph whose sizes are symbols is compiled as torch would")
            return dynamo.compile_with_symbols(graph, examples, self.request.lowering)
        if (line := dynamo.write_into(graph, UNSHARD)) is not None:
            raise CaptureError(
                "the forward writes into a parameter, of which it has a gathered copy",
                where=line,
                do="write after the step, into the parameter itself, or into a buffer",
            )
        sources = dynamo.input_sources(graph)
        detach_views(graph)
        for note in canonicalise(graph):
            self.note(note)

        # What is compiled outlives this object, in dynamo's cache: it holds the settings alone.
        own, target, watch = weakref.ref(self), self.target, self.watch
        digests: list[int] = []
        chosen: list[LoweringDecision] = []

        places = [
            i
            for i, x in enumerate(examples)
            if isinstance(x, Tensor) and not isinstance(x, Parameter)
        ]
        known = self.known_of(examples, places)
        made: list[Sums] = []

        def rewrite(traced: fx.GraphModule, results: int) -> None:
            compiler = own()
            assert compiler is not None, "its module is gone"
            digest = digest_of_graph(traced.graph, sources)
            made.append(compiler.rewrite(traced, results, sources, rows, known))
            # Of equal code ranks may add up other things, where one has other rows than the rest.
            digests.append(zlib.crc32(made[-1].exchanged().encode(), digest))
            how = compiler.decided[-1].lowering
            assert how is not None
            chosen.append(how)

        def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any):
            rewrite(joint, num_fwd_outputs)
            return dynamo.part_joint_graph(joint, inputs, num_fwd_outputs, options)

        def lower(side: fx.GraphModule, inputs: Any) -> Callable:
            if watch is None:
                return lower_graph(side, chosen[-1], target)
            running = functools.partial(watch.running, digests[-1])
            return lower_graph(side, chosen[-1], target, running)

        def alone(inference: fx.GraphModule, inputs: Any) -> Callable:
            rewrite(inference, len(inference.graph.output_node().args[0]))  # type: ignore[arg-type]
            return lower(inference, inputs)

        parts = partition, lower, alone, decomposition_table()
        compiling = functools.partial(dynamo.differentiate_and_compile, graph, examples, *parts)
        compiled = with_bases(graph, compiling)
        dynamo.forget_modules(graph)
        adds = any(sums.loss or sums.totals for sums in made)
        returned = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        results = {i: how for sums in made for i, how in sums.results.items() if i < returned}
        written = {i: how for sums in made for i, how in sums.written.items()}
        if not (adds or results or written):
            return compiled

        def followed(*inputs: Any) -> Any:
            compiler = own()
            as_compiled = compiler is not None and compiler.known_of(inputs, places) == known
            values = compiled(*inputs)
            if compiler is not None:
                for i, how in written.items():
                    compiler.known.forget(inputs[i])
                    if as_compiled and how is not None:
                        compiler.known[inputs[i]] = how
                if as_compiled:
                    for i, how in results.items():
                        compiler.known.made(values[i], how)
                elif adds:
                    compiler.note(OTHER_INPUTS)
            return values

        return followed

    def rewrite(
        self,
        joint: fx.GraphModule,
        results: int,
        sources: Sequence[str],
        rows: int,
        known: Mapping[int, Spread],
    ) -> Sums:
        """Decides for a graph's forward and backward, and applies it."""
        driver, request, mesh = self.driver, self.request, self.request.mesh
        described = GraphProgram(joint, results, sources, known, rows)
        self.guessed |= described.guessed
        program = described.program
        check_types(program, request.step.precision.compute)
        program.mesh = mesh
        program = driver.through(GRAPH_CAPTURED, program, groups=self.groups, rank=self.rank)
        program = driver.through(GRAPH_PLACED, program)
        sums = Sums()
        if mesh.world_size > 1 and rows:
            given = NOTHING_GIVEN
            if self.evaluates:
                handed, read = numbers_given()
                given = Given(handed, frozenset(read))
            sums = decide_sums(
                program, rows, described.spread, described.unknown, self.evaluates, given
            )
            sums.written = {at: sums.results.get(i) for i, at in described.written.items()}
        program = driver.through(GRAPH_SUMMED, program, mesh=mesh, sums=sums)
        again = gathers_again(request.placement, mesh)
        keeps = decide_for_graph(program, request.memory, again)
        program = memory.apply(program, keeps, REMEMBERED, driver)
        runs, program = schedule.decide_and_apply(
            program, request.schedule, self.target, SCHEDULED, driver
        )
        program = driver.through(BOUND, program, rank=self.rank)
        program = driver.through(
            GRAPH_TARGETED, program, target=self.target, strict=False, rank=self.rank
        )
        how = decide_lowering(program, request.lowering, self.target)
        if how.reason:
            program.note(how.reason)
        for note in program.notes:
            self.note(note)
        self.programs.append(program.copy())
        self.decided.append(Decisions(PlacementDecision(request.placement), keeps, runs, how))
        driver.through(GRAPH_LOWERED, program, groups=self.groups)
        described.give_back()
        dynamo.tag_sides(joint)
        return sums

    def known_of(self, inputs: Sequence[Any], places: Sequence[int]) -> dict[int, Spread]:
        """How ranks have the inputs of a graph at some places, where it is known."""
        found = ((i, self.known[inputs[i]]) for i in places)
        return {i: how for i, how in found if how is not None}

    def note(self, text: str) -> None:
        """Adds a line to the report, once."""
        if text not in self.notes:
            self.notes.append(text)
