"""Offload where the device has a link to its host: what a plan says, and what a rank would run."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import torch_internals
from stepgraph.cost.devices import find_device
from stepgraph.errors import BudgetError
from stepgraph.lowering.graphs.obstacles import find_obstacles
from stepgraph.lowering.graphs.pieces import stretches
from stepgraph.planning.explanation import explain
from stepgraph.planning.target import target_of
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY, is_copy, is_on_host
from stepgraph.program.program import tensors_of
from tests.propagation import differences
from tests.support import tiny_llama, token_batch

CUDA = target_of(find_device("h100"))


class Wide(nn.Module):
    """Products that take long for the bytes that they leave."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(torch.sin(layer(x))))
        return x.square().mean()


def planned(memory, device="h100"):
    with torch.device("meta"):
        model, batch = Wide(), torch.empty(16384, 8192)
    how = {"mesh": "dp=1", "placement": "ddp", "compute_dtype": None, "device": device}
    return stepgraph.plan(model, example=batch, memory=memory, **how)


def test_a_budget_offloads_where_that_is_faster_than_recomputing():
    full = planned("full").predicted
    plan = planned(f"budget:{full.peak_bytes}B")
    memory, predicted = plan.decisions["step"].memory, plan.predicted
    assert memory.offload and "offloaded" in memory.reason
    assert predicted.peak_bytes <= full.peak_bytes
    assert predicted.step_ms < 0.9 * full.step_ms
    assert predicted.bytes_by_category["on the host"] > 2**30
    assert "on the host" in str(plan)
    assert "on the host" not in full.bytes_by_category


def test_what_is_offloaded_costs_little_where_products_take_longer():
    none, offloaded = planned("none").predicted, planned("*=offload").predicted
    assert offloaded.peak_bytes < 0.8 * none.peak_bytes
    assert none.step_ms < offloaded.step_ms < 1.1 * none.step_ms


def test_a_budget_that_nothing_else_meets_lets_as_many_states_wait_as_it_takes(tmp_path):
    """A plan of it is read again, and says the same; a budget below what that can is an error."""
    with pytest.raises(BudgetError) as caught:
        planned("budget:1GiB")
    smallest = caught.value.smallest
    least = planned(f"budget:{smallest}B")
    assert least.predicted.peak_bytes <= smallest
    states = planned("none").predicted.bytes_by_category["optimizer"]
    assert least.predicted.bytes_by_category["on the host"] >= 0.99 * states
    limit = smallest + states // 4  # with twice that nothing has to
    plan = planned(f"budget:{limit}B")
    offload = [one for one in plan.decisions["step"].memory.offload if "OptimizerState" in one]
    assert plan.predicted.peak_bytes <= limit and 2 <= len(offload) <= 8
    assert plan.predicted.step_ms <= least.predicted.step_ms
    assert f"{len(offload)} optimizer states wait on the host" in " ".join(str(plan).split())
    assert "from one update to the next" in explain(plan, offload[0])
    plan.save(tmp_path / "plan.json")
    again = stepgraph.Plan.load(tmp_path / "plan.json")
    assert again.decisions == plan.decisions and again.predicted == plan.predicted


def test_states_come_and_go_beside_other_work():
    """Those of the next layer while the backward goes on; without room to hide, they are waited for."""
    none, away = planned("none").predicted, planned("optimizer=offload").predicted
    moved = 2 * away.bytes_by_category["on the host"]
    seconds = moved / find_device("h100").host.bandwidth
    assert away.step_ms - none.step_ms < 0.5e3 * seconds
    assert none.peak_bytes - away.peak_bytes > 0.5 * none.bytes_by_category["optimizer"]


def test_without_a_link_to_a_host_states_stay():
    full = planned("full", device="cpu").predicted
    with pytest.raises(BudgetError):
        planned(f"budget:{full.peak_bytes // 2}B", device="cpu")


@pytest.fixture(scope="module")
def of_cuda():
    """What a CUDA rank would run, on fake tensors."""
    model, batch = tiny_llama(1), token_batch(4)
    how = {
        "mesh": "dp=2",
        "placement": "zero3",
        "memory": "*.mlp=recompute,*=offload,optimizer=offload",
    }
    plan = stepgraph.plan(model, example=batch, device="h100", **how)
    with torch.device("meta"):
        there = tiny_llama(1)
    with torch_internals.new_fake_mode():
        moved = {k: torch.empty(v.shape, dtype=v.dtype, device="cuda") for k, v in batch.items()}
    return plan.programs(there, example=moved)["step"]


@pytest.mark.slow
def test_only_what_is_offloaded_is_on_the_host(of_cuda):
    assert sum(node.target is TO_HOST for node in of_cuda.operations()) > 10
    for node in of_cuda.operations():
        devices = {tensor.device.type for tensor in tensors_of(node.meta["val"])}
        assert devices == {"cpu" if is_on_host(node) else "cuda"}, node
    names = {node.name for node in of_cuda.graph.nodes if is_on_host(node)}
    assert {line.partition(":")[0] for line in differences(of_cuda, "cuda")} == names


def test_copies_are_captured(of_cuda):
    assert not find_obstacles(of_cuda, CUDA)


def test_a_copy_that_is_awaited_in_another_stretch_is_not_captured(of_cuda):
    starts = [node for node in of_cuda.operations() if node.target is TO_HOST]
    start = next(n for n in starts if not any(user is n.next for user in n.users))
    parts = stretches(of_cuda, {start.next: "an obstacle between a copy and its wait"})
    for part in parts:
        if part.captured:
            ends = {node.args[0] for node in part.program.operations() if node.target is WAIT_COPY}
            assert ends == {node for node in part.program.operations() if is_copy(node)}
    outside = [n.target for p in parts if not p.captured for n in p.program.operations()]
    assert TO_HOST in outside and WAIT_COPY in outside and TO_DEVICE not in outside
