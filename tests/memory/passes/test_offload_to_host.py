"""offload_to_host: what waits on the host comes back as it was, in time, and takes no room meanwhile."""

import pytest
import torch
from torch import nn

from stepgraph.cost.memory import memory_timeline
from stepgraph.memory.decide import decide
from stepgraph.memory.passes.offload_to_host import offload_to_host
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.memory.saved import saved_values
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY, is_copy
from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import BACKWARD, FORWARD
from tests.support import (
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden,
    captured,
    mlp,
    observed_pass,
    regression_batch,
    tiny_llama,
    token_batch,
    tower,
    values,
)


class Turned(nn.Module):
    """The backward reads a view, and the forward reads the same memory later, through another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        h = torch.exp(self.first(x))
        return (self.second(h.t()) * h.view(-1)[:2]).square().sum()


@pytest.fixture(scope="module", params=RANKS)
def step(request):
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    before, _, _ = observed_pass(
        "offload_to_host", model=model, batch=batch, optimizer=optimizer, ranks=request.param
    )
    return values(model, batch, optimizer), before


def copies(program, target):
    return [node for node in program.operations() if node.target is target]


def test_copies_stand_behind_the_last_reader_and_before_the_first():
    before, after, _ = observed_pass(
        "offload_to_host", model=Turned(), batch=torch.ones(6, 3), plan="ddp", memory="*=offload"
    )
    assert_golden(__file__, "offload_to_host", before, after)


def test_views_are_taken_again_of_what_has_come_back():
    model, batch = Turned(), torch.randn(6, 3)
    before, after, _ = observed_pass(
        "offload_to_host", model=model, batch=batch, plan="ddp", memory="*=offload"
    )
    for node in after.operations(
        FORWARD
    ):  # nothing of the forward is read but what was not asked for
        read = any(user.meta.get("phase") == BACKWARD for user in node.users)
        assert not read or node.target is WAIT_COPY or not _of_exp(node), node
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(before), inputs.execute(after))


def _of_exp(node):
    while node.all_input_nodes:
        if node.target is torch.ops.aten.exp.default:
            return True
        node = node.all_input_nodes[0]
    return False


def test_any_choice_of_values_gives_the_same_bits(step):
    inputs, before = step
    names = [node.meta["name"] for node in saved_values(before, ())]
    expected = inputs.execute(before)
    for start in range(3):
        decision = MemoryDecision("every third", offload=tuple(names[start::3]))
        after = offload_to_host(before.copy(), decision)
        check_invariants(after)
        assert len(copies(after, TO_HOST)) == len(copies(after, TO_DEVICE)) > 0
        assert_bitwise(expected, inputs.execute(after))


def test_what_is_recomputed_is_recomputed_of_what_has_come_back():
    model, batch = tiny_llama(2), token_batch()
    before, after, _ = observed_pass(
        "offload_to_host",
        model=model,
        batch=batch,
        ranks=2,
        memory="*.mlp=recompute,model.layers.*=offload",
    )
    assert len(copies(after, TO_HOST)) > 20
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(before), inputs.execute(after))


def test_an_empty_decision_changes_nothing(step):
    _, before = step
    assert str(offload_to_host(before.copy(), MemoryDecision("none"))) == str(before)


def test_the_second_compilation_takes_the_first_ones_decision(step):
    _, before = step
    decision = decide(before, "*=offload")
    one, other = (str(offload_to_host(before.copy(), decision)) for _ in range(2))
    assert one == other != str(before)


def test_a_value_that_is_a_result_stays_and_the_report_says_so(step):
    _, before = step
    results = [node for node in before.results if node.op == "call_function"]
    loss = next(node.meta["name"] for node in results if node.meta["phase"] == FORWARD)
    after = offload_to_host(before.copy(), MemoryDecision("", offload=(loss,)))
    assert not copies(after, TO_HOST)
    assert any("a result of the step stays on the device" in note for note in after.notes)


def test_of_several_results_each_is_named_by_itself():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = captured(model, torch.randn(4, 3), loss=lambda m, x: m(x).pow(3).sum())
    norm = next(n for n in before.operations(FORWARD) if isinstance(n.meta["val"], tuple))
    mean = next(n for n in norm.users if n.args[1] == 1)
    offload = (norm.meta["name"], mean.meta["name"])
    after = offload_to_host(before.copy(), MemoryDecision("", offload=offload))
    assert [node.args[0].meta["name"] for node in copies(after, TO_HOST)] == [offload[1]]
    assert any("has no memory of its own, and is not offloaded" in note for note in after.notes)


def test_what_is_offloaded_takes_no_memory_of_the_device_meanwhile():
    model, batch = tower(12)[0], (torch.randn(512, 8), torch.randn(512, 8))
    before, after, _ = observed_pass(
        "offload_to_host", model=model, batch=batch, plan="ddp", memory="*=offload"
    )
    kept, offloaded = memory_timeline(before), memory_timeline(after)
    held = kept.peak_of("activations") - offloaded.peak_of("activations")
    assert not kept.on_host and offloaded.on_host
    assert held == pytest.approx(offloaded.on_host, rel=0.2)
    assert offloaded.peak() < kept.peak() / 2


def test_a_copy_back_starts_at_least_one_reader_ahead_and_few_bytes_are_on_their_way():
    model, batch = tower(40)
    _, after, _ = observed_pass(
        "offload_to_host", model=model, batch=batch, plan="ddp", memory="*=offload"
    )
    sizes = [n.meta["val"].nbytes for n in copies(after, TO_DEVICE)]
    on_the_way = most = 0
    for node in after.operations():
        if is_copy(node):
            on_the_way += node.meta["val"].nbytes
        elif node.target is WAIT_COPY:
            on_the_way -= node.meta["val"].nbytes
        most = max(most, on_the_way)
    assert 2 * max(sizes) < most <= sum(sizes) // 16
    waits = [n for n in after.operations(BACKWARD) if n.target is WAIT_COPY]
    for earlier, wait in zip(waits, waits[1:], strict=False):
        assert wait.args[0] < earlier or wait.args[0].next is not wait
    assert not on_the_way


def test_after_recomputation_nothing_is_offloaded_that_only_the_forward_reads(step):
    _, before = step
    everything = decide(before, "full")
    names = tuple(everything.recompute)
    program = recompute_in_backward(before.copy(), everything)
    after = offload_to_host(program, MemoryDecision("", offload=names))
    assert not copies(after, TO_HOST)
