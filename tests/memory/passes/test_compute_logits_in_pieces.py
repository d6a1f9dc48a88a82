"""compute_logits_in_pieces: the same losses and gradients, of some tokens at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from stepgraph.analysis.row_regions import find_region
from stepgraph.errors import InvariantError
from stepgraph.lowering.bodies import in_pieces
from stepgraph.memory.passes.compute_logits_in_pieces import compute_logits_in_pieces
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program.build import Builder
from stepgraph.program.collectives import is_collective
from stepgraph.program.driver import PassDriver
from stepgraph.program.invariants import check_invariants
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD
from stepgraph.program.roles import Grad, Loss, Tangent
from stepgraph.runtime.ranks import parse_mesh
from tests.memory.heads import WIDTH, WORDS, Words, batch, divided, placed
from tests.sampling import sampled
from tests.support import (
    adamw,
    assert_bitwise,
    assert_golden,
    assert_summation,
    eager,
    programs_of,
    values,
)

HEADS = (
    "plain", "tied", "smoothed", "capped", "z-loss", "own", "focal", "taught",
)  # fmt: skip
WHOLE = (  # which are no loss of row by row
    "squared", "over the batch", "added up", "words first", "met again", "two-valued",
)  # fmt: skip
MESHES = (("dp=1", "ddp"), ("dp=2", "zero3"), ("dp=2,tp=2", "tp+zero3"))


def widest(program):
    return max(
        meta(node)["val"].numel()
        for node in program.operations()
        if isinstance(meta(node)["val"], torch.Tensor)
    )


def test_each_piece_has_its_loss_and_its_backward():
    _, before = placed("plain", "dp=2", "zero3")
    after, _ = divided(before, 2)
    assert_golden(__file__, "compute_logits_in_pieces", before, after)


@pytest.mark.parametrize("head, mesh, plan", sampled([(h, *on) for h in HEADS for on in MESHES]))
def test_every_head_is_the_same_in_pieces(head, mesh, plan):
    inputs, before = placed(head, mesh, plan)
    whole = inputs.execute(before)
    for pieces in (1, 3):
        after, found = divided(before, pieces)
        assert found
        assert widest(after) <= max(widest(before) / pieces * 1.5, WORDS * WIDTH)
        (assert_bitwise if pieces == 1 else assert_summation)(whole, inputs.execute(after))


@pytest.mark.parametrize("head", ["tied", "smoothed", "z-loss"])
def test_pieces_are_plain_pytorch(head):
    inputs, before = placed(head)
    torch.manual_seed(0)
    expected = eager(Words(head), batch())
    found = inputs.execute(divided(before, 4)[0])
    named = {role.name: value for role, value in found.items() if isinstance(role, Grad)}
    assert_summation(expected, named | {"loss": found[Loss()]})


@pytest.mark.parametrize("head", WHOLE)
def test_what_needs_all_rows_at_once_stays_whole(head):
    inputs, before = placed(head)
    product = next(n for n in before.operations(FORWARD) if meta(n)["name"] == "head/mm")
    assert find_region(before, product) is None
    decision = MemoryDecision("none", pieces={"head/mm": 4})
    after = compute_logits_in_pieces(before.copy(), decision)
    assert "head/mm is computed whole" in after.notes[-1]
    assert_bitwise(inputs.execute(before), inputs.execute(after))


def test_a_product_within_anothers_pieces_is_asked_for_in_vain():
    inputs, before = placed("taught")
    products = [meta(n)["name"] for n in before.operations(FORWARD) if meta(n)["module"] == "head"]
    decision = MemoryDecision("none", pieces=dict.fromkeys(products, 3))
    after = compute_logits_in_pieces(before.copy(), decision)
    check_invariants(after)
    assert widest(after) < widest(before)
    assert_summation(inputs.execute(before), inputs.execute(after))


@pytest.mark.parametrize("name", ["accumulate", "step"])
def test_micro_batches(name):
    inputs, before = placed("plain", "dp=2", "zero3", 2, None, name)
    after, found = divided(before, 3)
    assert found
    assert_summation(inputs.execute(before), inputs.execute(after))


def test_sums_of_bfloat16_are_in_float32():
    inputs, before = placed("smoothed", dtype=torch.bfloat16)
    after, _ = divided(before, 6)
    added = [n for n in after.operations() if ".piece" not in meta(n)["name"] and "add" in str(n)]
    assert {meta(node)["val"].dtype for node in added if meta(node)["module"] == "head"} == {
        torch.float32
    }
    products = {
        meta(node)["val"].shape[0]
        for node in after.operations(FORWARD)
        if meta(node)["name"].startswith("head/mm.backward.1.")
    }
    assert max(products) == WORDS // 2  # beside the sum of all of its rows
    assert_summation(inputs.execute(before), inputs.execute(after))


def test_a_head_over_shards_of_words_communicates_in_each_piece():
    _, before = placed("plain", "dp=2,tp=2", "tp+zero3")
    wide = [n for n in divided(before, 3)[0].operations() if is_collective(n)]
    assert len([n for n in wide if ".piece_" in meta(n)["name"]]) >= 3


def test_no_piece_is_another_program():
    _, before = placed("plain")
    assert str(compute_logits_in_pieces(before.copy(), MemoryDecision("none"))) == str(before)


def test_a_gradient_that_is_given_late_keeps_logits_whole():
    """Between forward and backward of a split step a caller stands, who gives the loss its gradient."""
    _, before = placed("plain")
    product = next(n for n in before.operations(FORWARD) if meta(n)["name"] == "head/mm")
    assert find_region(before, product) is not None
    late = before.copy()
    tangent = Builder(late, FORWARD).input(Tangent(), (), torch.float32, torch.device("cpu"))
    one = next(n for n in late.operations() if meta(n)["name"] == "full.backward")
    one.replace_all_uses_with(tangent)
    product = next(n for n in late.operations(FORWARD) if meta(n)["name"] == "head/mm")
    assert find_region(late, product) is None


def broken(change, match):
    _, before = placed("plain")
    after, _ = divided(before, 3)
    change(after)
    with pytest.raises(InvariantError, match=match):
        check_invariants(after)


def piece(program, name):
    return next(n for n in program.operations() if meta(n)["name"] == name)


def test_a_piece_before_its_weight_is_rejected():
    def change(program):
        next(program.operations()).prepend(piece(program, "gather.piece_2"))

    broken(change, "before it is made")


def test_pieces_of_other_rows_are_rejected():
    def change(program):
        node = piece(program, "gather")  # joined
        node.args = (node.args[0][:2], *node.args[1:])

    broken(change, "its metadata says")


def test_a_piece_in_the_backward_is_rejected():
    def change(program):
        meta(piece(program, "gather.piece_0"))["phase"] = "backward"

    broken(change, "forward reads backward")


class Random(nn.Module):
    """A head whose logits go through some operations, and whose loss is a sum of some terms."""

    def __init__(self, steps, terms, bias):
        super().__init__()
        self.head = nn.Linear(3, 9, bias=bias)
        self.steps, self.terms = steps, terms

    def forward(self, x, y):
        logits = self.head(x)
        for step in self.steps:
            logits = STEPS[step](logits)
        return sum(TERMS[term](logits, y) for term in self.terms)


STEPS = {
    "cap": lambda z: 3 * torch.tanh(z / 3),
    "scale": lambda z: z * 0.5,
    "double": lambda z: z.double().float(),
    "some words": lambda z: z[..., 1:],
    "flat": lambda z: z.reshape(-1, z.shape[-1]),
    "apart": lambda z: z.unsqueeze(-2).squeeze(-2),
    "swapped": lambda z: z.transpose(-1, 0).contiguous().transpose(-1, 0),
    "masked": lambda z: z.masked_fill(torch.arange(z.shape[-1]) == 2, -20.0),
}
TERMS = {
    "cross entropy": lambda z, y: F.cross_entropy(z.flatten(0, -2), y.flatten()),
    "sum": lambda z, y: F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum"),
    "z": lambda z, y: torch.logsumexp(z, -1).square().mean(),
    "entropy": lambda z, y: (torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(-1).mean(),
    "margin": lambda z, y: (z.amax(-1) - z.mean(-1)).relu().sum(),
    "squares": lambda z, y: z.square().sum(),
}


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    st.lists(st.sampled_from(sorted(TERMS)), min_size=1, max_size=2, unique=True),
    st.booleans(),
    st.integers(1, 9),
)
def test_any_head_and_loss_is_the_same_in_pieces(steps, terms, bias, pieces):
    torch.manual_seed(0)
    model = Random(steps, terms, bias)
    given_batch = torch.randn(4, 3, 3), torch.randint(0, 8, (4, 3))
    seen = []

    def observe(found, before, after, arguments):
        if found.name == "compute_logits_in_pieces":
            seen.append(before)

    driver = PassDriver(invariants=True, observe=observe)
    programs_of(model, given_batch, preset_plan("ddp", parse_mesh("dp=2")), None, driver)
    inputs = values(model, given_batch)
    after, _ = divided(seen[0], pieces)
    assert_summation(inputs.execute(seen[0]), inputs.execute(after))


def test_an_optimizer_reads_the_sum_of_all_pieces():
    torch.manual_seed(0)
    model = Words("tied")
    optimizer = adamw(model)
    plan = preset_plan("zero3", parse_mesh("dp=2"), step=StepSettings("optimizer"))
    before = programs_of(model, batch(), plan, optimizer).programs["step"]
    after, found = divided(before, 2)
    inputs = values(model, batch(), optimizer)
    assert found == 1
    assert_summation(inputs.execute(before), inputs.execute(after))


def test_what_is_compiled_together_is_of_one_piece():
    """Two are too few to be worth it otherwise; a compiler would compute both of their logits first."""
    program = divided(placed("plain")[1], 2)[0]
    pieces = in_pieces(program)
    assert pieces is not None
    together = [set() for _ in pieces.calls]
    for node, call in pieces.piece_of.items():
        together[call].add(meta(node).get("rows_piece"))
    assert all(len(numbers) == 1 for numbers in together)
    assert set.union(*together) == {None, 0, 1}
