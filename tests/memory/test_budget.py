"""Policies ``budget:SIZE`` and ``auto``: the same answer, whatever is kept, within what was given."""

import functools
from dataclasses import replace

import pytest
import torch

import stepgraph
from stepgraph.cost.memory import memory_timeline
from stepgraph.errors import BudgetError, MemoryPolicyError, UsageError
from stepgraph.memory.by_policy import decide_by_policy
from stepgraph.memory.decide import decide, decide_for_graph, leanest
from stepgraph.memory.presets import budget_of, parse_policy
from stepgraph.memory.solver.blocks import Blocks, Level
from stepgraph.pipeline import make
from stepgraph.planning.plan import preset_plan
from stepgraph.program.program import BACKWARD
from stepgraph.runtime.ranks import parse_mesh
from tests.memory.solver.search_support import stacks
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import HOST, VOCABULARY, adamw, captured, tiny_llama, token_batch


def tiny_gpt2(seed=0):
    """With dropout, in all the places where GPT-2 has it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return GPT2LMHeadModel(config).train()


CASES = {
    "llama": (lambda: tiny_llama(2), "zero3", "dp=2"),
    "gpt2": (tiny_gpt2, "zero3", "dp=2"),
    "tensor parallel": (lambda: tiny_llama(2, num_key_value_heads=2), "tp", "tp=2"),
}
BATCH = token_batch(4)
BUDGETS = (0.0, 0.4, 0.8)


class Case:
    """A step that is captured once: what it comes to when all is kept, and how much memory it can take."""

    def __init__(self, name):
        self.make, preset, mesh = CASES[name]
        self.plan = preset_plan(preset, parse_mesh(mesh), device="h100")
        self.captured = None
        self.none = self.run("none")

    def run(self, memory, plan=None):
        model = self.make()
        run = OneProcessRun(
            model,
            optimizer=adamw(model),
            mesh=str(self.plan.mesh),
            plan=plan or self.plan,
            memory=memory,
            captured=self.captured,
        )
        losses = [run.step(BATCH)]
        self.captured = run.captured
        return run, losses, run.parameters()

    def peak(self, memory):
        made = make(self.captured.programs, self.plan.under(memory=memory), HOST)
        return memory_timeline(made.programs["step"]).peak()

    @functools.cached_property
    def ends(self):
        return self.peak("full"), self.peak("none")

    def budget(self, part):
        low, high = self.ends
        return int(1.01 * low + part * (high - 1.01 * low))


@functools.cache
def case(name):
    return Case(name)


@pytest.mark.parametrize(
    ("name", "part"),
    sampled([(name, part) for name in ("gpt2", "llama") for part in BUDGETS], every=8),
)
def test_the_same_bits_whatever_is_kept(name, part):
    step = case(name)
    budget = step.budget(part)
    run, losses, parameters = step.run(f"budget:{budget}B")
    _, expected, kept = step.none
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    assert kept.keys() == parameters.keys()
    assert all(torch.equal(value, parameters[key]) for key, value in kept.items())
    again = {n.meta.get("recomputed_from") for n in run.programs["step"].operations(BACKWARD)}
    assert len(again) > 1
    assert run.plan.decisions["step"].memory.reason.startswith(f"memory budget:{budget}B: ")


def test_what_is_communicated_twice_comes_to_the_same_bits():
    step = case("tensor parallel")
    made, expected, kept = step.none
    decided = made.plan.decisions["step"]
    blocks = Blocks(made.made.programs["step"], gather_again=True)
    twice = Level("full", (frozenset(),), communicates=True)
    decision = blocks.decision("none", [twice] * len(blocks.blocks))
    assert any("all_reduce" in name for name in decision.recompute)
    decided = replace(decided, memory=decision, schedule=None)
    run, losses, parameters = step.run("none", made.plan.with_decisions("step", decided))
    again = {n.meta.get("recomputed_from", "") for n in run.programs["step"].operations(BACKWARD)}
    assert any("all_reduce" in name for name in again)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    assert all(torch.equal(value, parameters[key]) for key, value in kept.items())


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_says_what_can():
    step = case("gpt2")
    with pytest.raises(BudgetError, match="no plan fits 1 KiB a rank: the smallest peak is") as e:
        step.run("budget:1KiB")
    assert 0 < e.value.smallest <= 1.01 * step.ends[0]
    assert "at the peak of" in str(e.value) and "docs/errors.md#budgeterror" in str(e.value)
    step.run(f"budget:{e.value.smallest}B")


def test_auto_keeps_all_where_it_fits():
    model = tiny_llama(1)
    plan = preset_plan("ddp", parse_mesh("dp=2"), device="h100", memory="auto")
    run = OneProcessRun(model, optimizer=adamw(model), mesh="dp=2", plan=plan)
    run.step(BATCH)
    memory = run.plan.decisions["step"].memory
    assert memory.policy == "auto" and not memory.recompute
    assert "all is kept" in memory.reason


@pytest.mark.parametrize("text", ["budget:8XiB", "budget:much", "budget:-1GiB", "budget:0"])
def test_a_bad_unit_is_a_usage_error(text):
    with pytest.raises(UsageError, match="its units are B, KiB, MiB, GiB"):
        parse_policy(text)


@pytest.mark.parametrize("text", ["budget", "budget:", "auto:2", "budgets:8GiB"])
def test_what_is_no_policy(text):
    with pytest.raises(UsageError, match="unknown memory policy .*\n.*budget:SIZE"):
        parse_policy(text)


def test_the_smaller_of_two_budgets_counts():
    assert budget_of("budget:2KiB", None) == 2048 == budget_of("budget:2KiB", 4096)
    assert budget_of("budget:2KiB", 1024) == 1024 == budget_of("auto", 1024)
    assert budget_of("none", None) is None
    assert (leanest("budget:2KiB"), leanest("auto"), leanest("ops")) == ("full", "full", "ops")


def test_what_has_no_backward_keeps_nothing():
    program = captured(tiny_llama(1), token_batch(2), training=False)
    decision = decide(program, "budget:1KiB")
    assert decision == decide_by_policy(program, "none").__class__("budget:1KiB")


def test_one_graph_of_many_takes_a_named_policy():
    program = captured(tiny_llama(1), token_batch(2))
    with pytest.raises(MemoryPolicyError, match="needs a step that is captured as one program"):
        decide_for_graph(program, "auto", gather_again=True)


def test_an_engine_trains_within_a_budget_of_the_machine_at_hand():
    model = tiny_llama(2)
    given = {"memory": "budget:120KiB", "lowering": "eager", "strict": True}
    engine = stepgraph.Engine(model, optimizer=adamw(model), plan="ddp", **given)
    losses = [float(engine.step(BATCH)) for _ in range(2)]
    assert losses[1] < losses[0]
    assert engine.plan.request.device and engine.plan.decisions["step"].memory.recompute
    assert "memory budget:120KiB" in engine.report()


def test_a_budget_is_met_where_the_code_checkpoints_some_blocks_itself():
    """Those have nothing to give; the others, of the same operations, have."""

    def peak(memory):
        model, batch = stacks(own=(0, 3))
        optimizer = torch.optim.SGD(model.parameters())
        settings = {"plan": "ddp", "memory": memory, "lowering": "eager"}
        engine = stepgraph.Engine(model, optimizer=optimizer, **settings)
        engine.step(batch)
        return memory_timeline(engine.programs["step"]).peak()

    least = peak("full")
    assert peak(f"budget:{least}B") <= least < peak("none")
