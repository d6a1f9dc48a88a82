"""Into how many pieces logits go, and who decides it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepgraph import plan
from stepgraph.analysis.row_regions import find_regions
from stepgraph.cost.devices import find_device
from stepgraph.cost.memory import memory_timeline
from stepgraph.errors import BudgetError
from stepgraph.memory.decide import DIVIDED, WHOLE, Means, decide
from stepgraph.memory.pieces import MOST, find_pieces, held_bytes
from stepgraph.pipeline import simulation
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.sizes import show_bytes, show_bytes_up
from stepgraph.planning.target import target_of
from stepgraph.program.metadata import meta
from stepgraph.runtime.ranks import parse_mesh
from tests.equivalence.planted import words
from tests.memory.solver.search_support import DEVICE, placed, plan_on
from tests.sampling import sampled
from tests.support import adamw, mlp, programs_of, regression_batch, tiny_llama, token_batch


@pytest.fixture(scope="module")
def whole():
    """A step with a head that takes most of it, and its number of bytes at the peak."""
    return decided("none").programs["step"]


def decided(memory, budget=None, **how):
    model, batch = words()
    plan = preset_plan("zero3", parse_mesh("dp=2"), memory=memory, device="h100")
    return programs_of(model, batch, plan.under(memory_budget=budget), adamw(model), **how)


def test_pieces_are_a_small_part_of_what_a_rank_has(whole):
    (region,) = find_regions(whole, 0)
    held = held_bytes(region)
    assert held >= 3 * meta(region.product)["val"].numel() * 4
    assert find_pieces(whole, 16 * held) == {}
    assert find_pieces(whole, 16 * held - 1) == {"head/mm": 2}
    assert find_pieces(whole, held) == {"head/mm": 16}
    assert find_pieces(whole, 1) == {"head/mm": min(MOST, region.rows)}


def test_a_budget_without_room_for_logits_divides_them():
    made = decided("budget:56KiB")
    decision = made.plan.decisions["step"].memory
    assert decision.pieces and set(decision.pieces) == {"head/mm"}
    assert "head/mm in" in decision.reason and "of 56 KiB" in decision.reason
    names = {meta(node)["name"] for node in made.programs["step"].operations()}
    assert "head/mm" not in names and "head/mm.piece_0" in names


def test_logits_are_whole_where_they_fit():
    assert decided("budget:1GiB").plan.decisions["step"].memory.pieces is None


@pytest.mark.parametrize("policy", ["full", "ops", "table=recompute"])
def test_a_named_policy_divides_them_where_a_budget_beside_it_wants_that(policy):
    whole = memory_timeline(decided("full").programs["step"], fused=True).peak()
    kept = decided(policy, whole // 2).plan.decisions["step"].memory
    assert kept.policy == policy and set(kept.pieces) == {"head/mm"}
    assert "head/mm in" in kept.reason and f"of {show_bytes(whole // 2)}" in kept.reason
    assert decided(policy, 2 * whole).plan.decisions["step"].memory.pieces is None
    assert decided(policy).plan.decisions["step"].memory.pieces is None
    assert decided("none", whole // 2).plan.decisions["step"].memory.pieces is None


class Wide(nn.Module):
    """A head of many words for few rows: sums of its gradient are more than its logits."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 256), nn.Linear(256, 4000, bias=False)

    def forward(self, ids, labels):
        """The loss."""
        return nn.functional.cross_entropy(self.head(self.table(ids)).float(), labels)


def wide(rows, **asked):
    ids = torch.zeros(rows, dtype=torch.int64)
    return plan(
        Wide(), example={"ids": ids, "labels": ids}, optimizer="sgd", mesh="dp=1", device="h100",
        placement="ddp", memory="full", **asked,
    )  # fmt: skip


def test_what_fits_with_whole_logits_has_them_whole():
    peak = wide(512).predicted.peak_bytes
    assert wide(512, memory_budget=peak).decisions["step"].memory.pieces is None
    in_pieces = wide(512, memory_budget=peak - 1)
    assert in_pieces.decisions["step"].memory.pieces and in_pieces.predicted.peak_bytes < peak


def test_pieces_that_hold_more_than_whole_logits_are_not_taken():
    peak = wide(64).predicted.peak_bytes
    with pytest.raises(BudgetError) as caught:
        wide(64, memory_budget=peak - 1)
    assert f"the smallest peak is {show_bytes_up(peak)}" in str(caught.value)


def test_a_policy_that_fits_with_no_pieces_takes_them_all_the_same():
    kept = decided("full", 8 << 10).plan.decisions["step"].memory
    assert kept.pieces and "of 8 KiB" in kept.reason


def test_what_stands_for_a_search_or_is_a_short_step_simulates_none(whole):
    def refuse():
        raise AssertionError("nothing needs to be simulated")

    (region,) = find_regions(whole, 0)
    means = Means(refuse, find_device("h100"), True, budget=4 * held_bytes(region))
    asked = decided("none").programs["step"], "full", True, lambda: means
    assert decide(*asked, WHOLE).pieces is None
    assert decide(*asked, DIVIDED).pieces == {"head/mm": 4}


def test_an_unmeetable_budget_says_the_smallest_with_pieces():
    with pytest.raises(BudgetError) as caught:
        decided("budget:8KiB")
    assert decided(f"budget:{caught.value.smallest}").plan.decisions["step"].memory.pieces


@pytest.mark.parametrize(
    "model, batch", sampled([(tiny_llama(), token_batch()), (mlp(), regression_batch())])
)
def test_only_the_head_is_divided(model, batch):
    plan = preset_plan("ddp", parse_mesh("dp=1"))
    program = programs_of(model, batch, plan).programs["step"]
    assert [meta(region.product)["name"] for region in find_regions(program, 0)] in (
        [],
        ["lm_head/mm"],
    )


class Words(nn.Module):
    """Layers that repeat, and a head that is wide beside them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8192, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 8192, bias=False)

    def forward(self, tokens, labels):
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_a_search_is_no_slower_than_a_named_policy_in_whatever_pieces():
    asked = plan_on()
    program = placed(Words(), (torch.zeros(16, 512, dtype=torch.int64),) * 2, asked)
    means = Means(simulation(asked, target_of(DEVICE)), DEVICE, fused=True)

    def taken(policy, budget):
        means.budget = budget
        return means.simulate(program, decide(program, policy, means=lambda: means))

    most = taken("none", 1).memory.peak()
    with pytest.raises(BudgetError) as caught:
        taken("auto", 1)
    least = caught.value.smallest
    for part in (1, 2, 4, 7):
        budget = least + (most - least) * part // 8
        found = taken("auto", budget)
        named = [taken(policy, budget) for policy in ("none", "ops", "full", "layers:2")]
        fitting = [trial.seconds for trial in named if trial.memory.peak() <= budget]
        assert found.memory.peak() <= budget
        assert found.seconds <= min(fitting) * 1.001


@pytest.mark.parametrize("gain, pieces", [(0.0, 2), (0.004, 2), (0.05, 8)])
def test_more_pieces_have_to_be_worth_their_calls(gain, pieces):
    asked = plan_on()
    program = placed(Words(), (torch.zeros(16, 512, dtype=torch.int64),) * 2, asked)
    real = simulation(asked, target_of(DEVICE))

    def simulate(program, decision):
        """All takes a second, but for a gain with each doubling of the pieces up to eight."""
        many = max((decision.pieces or {"": 1}).values())
        trial, seconds = real(program, decision), 1 - gain * math.log2(min(many, 8))
        return replace(trial, line=replace(trial.line, seconds=seconds))

    means = Means(simulate, DEVICE, fused=True)
    whole = real(program, decide(program, "none")).memory.peak()
    means.budget = whole * 3 // 4
    assert decide(program, "auto", means=lambda: means).pieces == {"head/mm": pieces}
