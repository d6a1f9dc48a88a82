"""Programs in pieces, run operator by operator: what the driver and the bodies do, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepgraph.capture.module import default_loss
from stepgraph.capture.step import Source
from stepgraph.equivalence.lowered import run_lowered
from stepgraph.equivalence.values import GlobalValues
from stepgraph.lowering.bodies import Body, Pieces, in_pieces
from stepgraph.lowering.driver import drive
from stepgraph.lowering.eager import operator_by_operator
from stepgraph.lowering.passes.communicate_between_layers import communicate_between_layers
from stepgraph.lowering.passes.fuse_updates import fuse_updates
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.lowering.record import Lowering, no_obstacles
from stepgraph.pipeline import ALL_RANKS, capture_of, make
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.planning.target import Target
from stepgraph.program.program import Program
from stepgraph.runtime.batches import flatten_batch, global_spec
from stepgraph.runtime.ranks import parse_mesh
from tests.support import CPU, HOST, assert_bitwise, bound


def interpreted(body: Body) -> Callable:
    """A body as the Python that fx generates."""
    module = operator_by_operator(body.module())

    def run(given: list) -> Any:
        values = list(given)
        given.clear()
        with torch.no_grad():
            return module(*values)

    return run


def pieces_of(program: Program) -> Pieces | None:
    """A bound Program in pieces."""
    return _in_pieces(write_state_in_place(program.copy()))


def _in_pieces(program: Program) -> Pieces | None:
    return in_pieces(communicate_between_layers(program))


def compare(
    model: nn.Module,
    batch: Any,
    loss: Callable | None = None,
    optimizer: Callable = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    mesh: str = "dp=1",
    plan: str = "ddp",
    clip: float | None = None,
    target: Target = HOST,
    run: bool = True,
    **how: Any,
) -> dict[str, list[int]]:
    """Runs the programs of a step in pieces and as a whole: the same bits, on every rank.

    Args:
        run: False: they are only taken apart.

    Returns:
        for each program which of the bodies that are compiled each of its calls runs; empty: it was not
        taken apart.
    """
    made_optimizer, shape = optimizer(model), parse_mesh(mesh)
    micro_batches = how.pop("micro_batches", 1)
    settings = StepSettings("optimizer", micro_batches, clip is not None)
    spec = global_spec(flatten_batch(batch, CPU), micro_batches, 1)
    source = Source(model, loss or default_loss, spec, made_optimizer)
    decided = preset_plan(plan, shape, step=settings, **how)
    reduces = reduces_each_micro_batch(decided.placement, shape)
    captured = capture_of(source, settings).step(reduces)
    programs = make(captured.programs, decided, target, ALL_RANKS).programs
    values = GlobalValues(source, flatten_batch(batch, CPU), settings, clip)
    found = {}
    for name, program in programs.items():
        ranks = bound(program)
        pieces = _in_pieces(fuse_updates(write_state_in_place(ranks[0].copy()), fuses=True))
        compiled = [call.body for call in pieces.calls if not call.body.plain] if pieces else []
        bodies = list(dict.fromkeys(map(id, compiled)))
        found[name] = [bodies.index(id(body)) for body in compiled]
        if not run:
            continue
        before = run_lowered(values, ranks, "eager", target)
        assert_bitwise(before, run_lowered(values, ranks, "pieces", target))
    return found


def _make(program: Program, target: Any) -> Callable:
    pieces = _in_pieces(program)
    return (
        drive(pieces, [*map(interpreted, pieces.bodies)])
        if pieces
        else LOWERINGS["eager"].make(program, target)
    )


PIECES = Lowering("pieces", no_obstacles, _make)
