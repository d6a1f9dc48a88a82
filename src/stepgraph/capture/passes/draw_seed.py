"""Draws the seed of a graph."""

import torch

from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program
from stepgraph.program.randomness import RANKS_APART
from stepgraph.program.record import DISTRIBUTION, Results, Values, program_pass

aten = torch.ops.aten


def _expected(values: Values, before: Program, after: Program, rank: int) -> Results:
    """The program under the words that torch's generator has next, made other words on every rank."""
    if roles.Seed() not in before.inputs:
        return values.execute(before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(values.torch_seed)
        words = torch.randint(0, 2**62, [3])
    return values.execute(before, inputs={roles.Seed(): words + rank * RANKS_APART})


@program_pass(
    reads="the input ``Seed``",
    writes="the operation that draws it, other words on every rank",
    preserves=DISTRIBUTION,
    reference=_expected,
)
def draw_seed(program: Program, rank: int) -> Program:
    """The seed of a graph's random operations comes out of torch's generator, once a forward."""
    if roles.Seed() not in program.inputs:
        return program
    given = program.input_node(roles.Seed())
    first = next(program.operations())
    emit = Builder(program, FORWARD, first)
    device = meta(given)["val"].device
    words = emit(aten.randint.low, 0, 2**62, [3], dtype=torch.int64, device=device)
    given.replace_all_uses_with(emit(aten.add.Scalar, words, rank * RANKS_APART))
    program.keep_inputs(lambda role, _: role != roles.Seed())
    return program.finish()
