"""Heads behind sequence parallelism in pieces: neither rows nor their gradients are ever gathered whole."""

import functools

import pytest

from stepgraph.analysis.row_regions import find_regions
from stepgraph.memory.gathered_rows import find_gathered_rows
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program.collectives import KINDS
from stepgraph.program.driver import PassDriver
from stepgraph.program.metadata import meta
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.schedule.buckets import Sizes, find_buckets
from stepgraph.schedule.waits import find_waits
from tests.memory.heads import divided
from tests.sampling import sampled
from tests.support import assert_summation, programs_of, tiny_llama, token_batch, values

ROWS, LENGTH = 8, 8
CASES = [
    (mesh, plan, words, tied)
    for mesh, plan in (("dp=2,tp=2", "tp+sp+zero3"), ("tp=2", "tp+sp"), ("dp=2,tp=2", "tp+sp+ddp"))
    for words in (1024, 48)  # the first is sharded by words
    for tied in (False, True)
]


@functools.cache
def placed(mesh, plan, words=1024, tied=False):
    """Inputs, and the program before the pass."""
    model = tiny_llama(vocab_size=words, tie_word_embeddings=tied)
    batch = token_batch(ROWS, LENGTH)
    batch = {name: value % words for name, value in batch.items()}
    step, seen = StepSettings(None, 1), []

    def observe(found, before, after, arguments):
        if found.name == "compute_logits_in_pieces" and before.name == "step":
            seen.append(before)

    driver = PassDriver(invariants=True, observe=observe)
    programs_of(model, batch, preset_plan(plan, parse_mesh(mesh), step=step), None, driver)
    return values(model, batch, settings=step), seen[0]


def gathered(program, pieces):
    """Of the head, how its rows are gathered."""
    regions = [r for r in find_regions(program, 0) if meta(r.product)["name"] == "lm_head/mm"]
    return find_gathered_rows(regions[0], pieces)


@pytest.mark.parametrize("mesh, plan, words, tied", sampled(CASES, every=3))
def test_pieces_of_every_ranks_rows_are_the_same(mesh, plan, words, tied):
    inputs, before = placed(mesh, plan, words, tied)
    whole = inputs.execute(before)
    for pieces in (1, 2, 4):
        after, found = divided(before, pieces)
        assert found
        assert_summation(whole, inputs.execute(after))


@pytest.mark.parametrize("pieces", [2, 4])
def test_rows_are_gathered_for_each_piece_and_what_it_makes_is_scattered(pieces):
    _, before = placed("dp=2,tp=2", "tp+sp+zero3")
    found = gathered(before, pieces)
    assert found is not None and found.sizes == (ROWS // 2, 2, pieces, LENGTH // 2 // pieces, 1)
    assert len(found.scattered) == 1
    after, _ = divided(before, pieces)
    hidden = meta(found.gather)["val"].numel()
    rows = [n for n in after.operations() if "rows_piece" in meta(n)]
    for kind in ("all_gather", "reduce_scatter"):
        of_pieces = [n for n in rows if KINDS.get(n.target) == kind]
        assert len(of_pieces) == pieces
    whole = [n for n in after.operations() if KINDS.get(n.target) == "all_gather"]
    sizes = [meta(n)["val"].numel() for n in whole if "rows_piece" in meta(n)]
    assert sizes == [hidden // pieces] * pieces


def test_rows_that_do_not_divide_are_gathered_whole():
    inputs, before = placed("dp=2,tp=2", "tp+sp+zero3")
    assert gathered(before, 3) is None
    after, _ = divided(before, 3)
    assert_summation(inputs.execute(before), inputs.execute(after))


def test_rows_that_are_no_shards_follow_each_other():
    _, before = placed("dp=2,tp=2", "tp+zero3")
    assert gathered(before, 2) is None


def test_collectives_of_pieces_are_not_merged_and_complete_within_the_next_piece():
    _, before = placed("dp=2,tp=2", "tp+sp+zero3")
    after, _ = divided(before, 4)
    everything = Sizes(large=2**40, reduction=2**40, gather=2**40, table=1)
    merged = {name for bucket in find_buckets(after, everything) for name in bucket}
    nodes = {meta(n)["name"]: n for n in after.graph.nodes if "name" in meta(n)}
    assert merged and not any("rows_piece" in meta(nodes[name]) for name in merged)
    position = {node: i for i, node in enumerate(after.graph.nodes)}
    scatters = [
        n for n in after.operations()
        if KINDS.get(n.target) == "reduce_scatter" and "rows_piece" in meta(n)
    ]  # fmt: skip
    waits = find_waits(after, overlaps=True)
    for scatter, following in zip(scatters, scatters[1:], strict=False):
        (wait,) = scatter.users
        ends = nodes.get(waits.get(meta(wait)["name"], ""), wait)
        assert position[ends] <= position[following]
