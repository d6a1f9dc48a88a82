"""What is captured: when, where its memory is, what is refused, and how it ends."""

from __future__ import annotations

import os
import threading
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph
from stepgraph.errors import LoweringError, ShapeLimitError
from stepgraph.lowering.graphs import captured, device
from stepgraph.lowering.graphs.captured import Captured, bring, hand_out, like
from stepgraph.lowering.graphs.draws import LIMIT, Draws, drawing
from stepgraph.runtime.ranks import fit_for_graphs
from tests.graphs.recorder import RecordedGraph, Recorder, RefusedError
from tests.graphs.training import ROWS, assert_same, batch, model, start, train

HERE = torch.device("cpu")


def test_a_shape_has_a_graph_of_its_own_up_to_a_bound(recorder):
    engines = [start(lowering, max_shapes=2) for lowering in ("eager", "cuda_graph_eager")]
    for step in range(8):
        one, other = (engine.step(batch(step, ROWS + step % 2)) for engine in engines)
        assert torch.equal(one, other)
    assert [graph.replays for graph in recorder.captures] == [3, 3]
    with pytest.raises(ShapeLimitError):
        engines[1].step(batch(0, ROWS + 2))


def test_results_are_not_written_by_later_steps(recorder):
    engine = start("cuda_graph_eager")
    losses = [engine.step(batch(step)) for step in range(4)]
    kept = [loss.clone() for loss in losses]
    for step in range(4, 7):
        engine.step(batch(step))
    assert torch.equal(torch.stack(losses), torch.stack(kept))
    assert len({loss.data_ptr() for loss in losses}) == len(losses)


def test_gradients_of_an_engine_without_an_optimizer_are_kept(recorder):
    engines = [
        stepgraph.Engine(model(), lowering=lowering, plan="zero3")
        for lowering in ("eager", "cuda_graph_eager")
    ]
    held = []
    for step in range(3):
        for engine in engines:
            engine.step(batch(step))
        held.append([engine.model.head.weight.grad for engine in engines])
    for one, other in held:
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_a_parameter_that_moved_is_an_error(recorder):
    engine = start("cuda_graph_eager")
    for step in range(3):
        engine.step(batch(step))
    role, held = next(
        (role, tensor) for role, tensor in engine._state.tensors.items() if tensor.dim() == 2
    )
    held.data = held.detach().clone()
    with pytest.raises(
        LoweringError, match="is not where it was when the step was captured"
    ) as error:
        engine.step(batch(3))
    assert role.name in str(error.value)


def test_another_thread_is_an_error(recorder):
    engine = start("cuda_graph_eager")
    for step in range(3):
        engine.step(batch(step))
    raised = []

    def step():
        try:
            engine.step(batch(3))
        except LoweringError as error:
            raised.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "another thread" in raised[0]


def test_a_thread_has_a_pool_of_its_own(monkeypatch):
    made = []
    monkeypatch.setattr(device, "make_graphs", lambda where: made.append(where) or Recorder())
    device.forget_graphs()
    assert device.graphs_of(HERE) is device.graphs_of(HERE)
    thread = threading.Thread(target=device.graphs_of, args=(HERE,))
    thread.start()
    thread.join()
    assert made == [HERE, HERE]
    device.forget_graphs()


def test_a_closed_engine_captures_anew(recorder):
    expected = train("eager", 8)
    engine = start("cuda_graph_eager")
    schedule = torch.optim.lr_scheduler.StepLR(engine._optimizer, 3, 0.7)
    losses = []
    for step in range(8):
        losses.append(engine.step(batch(step)))
        schedule.step()
        if step == 3:
            engine.close()
            assert all(graph.released for graph in recorder.captures)
    assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
    assert recorder.events == ["warm up", "capture"] * 2


def test_graphs_go_before_the_process_group(recorder):
    engine = start("cuda_graph_eager")
    for step in range(2):
        engine.step(batch(step))
    recorder.group_is_there = lambda: False
    with pytest.raises(RefusedError, match="process group"):
        engine.close()
    recorder.group_is_there = lambda: True
    engine.close()


def test_strides_of_one_place_are_no_other_layout(recorder):
    """A column is laid out alike, whatever row it was cut from."""
    losses = []
    for lowering in ("eager", "cuda_graph_eager"):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = stepgraph.Engine(
            model, loss=lambda m, b: (m(b[0]) - b[1]).square().mean(), optimizer=optimizer,
            plan="ddp", lowering=lowering,
        )  # fmt: skip
        columns = [torch.arange(6.0)[:, None], torch.arange(6.0)[None].t()]
        assert columns[0].stride() != columns[1].stride()
        x = torch.ones(6, 8)
        losses.append([engine.step((x, columns[step > 2])) for step in range(6)])
    assert torch.equal(*map(torch.stack, losses))


def test_a_capture_needs_a_warm_up(recorder):
    stage = Captured(lambda given: [given[0] + 1], ["x"])
    stage.warm = captured.WARM_UPS
    with pytest.raises(LoweringError, match="a capture before a warm-up"):
        stage([torch.ones(2)], 0, HERE)


def test_what_torch_cannot_capture_is_an_error_with_its_words(recorder):
    stage = Captured(lambda given: [torch.histc(given[0], 2)], ["x"])
    stage([torch.ones(2)], 0, HERE)
    with pytest.raises(LoweringError, match="could not capture") as error:
        stage([torch.ones(2)], 0, HERE)
    assert "operation not permitted when stream is capturing" in str(error.value)


def test_a_number_of_the_host_would_stay_as_it_was(recorder):
    """What the recorder is worth: it holds what was captured, not the code."""
    numbers = iter(range(10))
    stage = Captured(lambda given: [given[0] + next(numbers)], ["x"])
    x = torch.zeros(2)
    assert [stage([x], 0, HERE)[0].tolist() for _ in range(4)] == [[0, 0], [1, 1], [1, 1], [1, 1]]


def test_an_argument_that_moves_is_copied(recorder):
    stage = Captured(lambda given: [given[0] * 2], [None])
    found = [stage([torch.full((2,), float(i))], 0, HERE)[0].tolist() for i in range(4)]
    assert found == [[0, 0], [2, 2], [4, 4], [6, 6]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t(), torch.arange(3.0).expand(2, 3),
        torch.arange(12.0).view(2, 6)[:, ::2], torch.tensor(2.0), torch.zeros(0, 3),
    ],
    ids=["rows", "columns", "expanded", "with gaps", "a number", "empty"],
)  # fmt: skip
def test_copies_are_laid_out_alike(tensor):
    for copy in (hand_out(tensor), bring(tensor, like(tensor))):
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


class Launched(TorchDispatchMode):
    """Which operations are launched one by one."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_replay_is_the_batch_the_graph_and_the_loss(recorder, monkeypatch, micro_batches):
    """Step, learning rate and seed are tensors that the graph advances, or that stand as they are."""
    engine = start("cuda_graph_eager", micro_batches=micro_batches)
    for step in range(4):
        engine.step(batch(step))
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: None)
    with Launched() as launched:
        engine.step(batch(4))
    assert launched.names["copy_"] == 2 * micro_batches + 1  # two leaves of a batch; the loss
    assert not {"fill_", "add_"} & launched.names.keys()
    assert launched.names.total() - launched.names["copy_"] < 25  # views and zeroed accumulators


def test_capturing_is_no_compilation(recorder):
    engine = start("cuda_graph_eager")
    with stepgraph.no_recompiles(after=1):
        for step in range(4):
            engine.step(batch(step))
    assert recorder.captures and engine.stats.compiles == 1


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "0"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}, "1"),
        ({}, None),
    ],
    ids=["it grows", "somebody chose", "it does not grow"],
)
def test_communicators_may_be_captured_whatever_the_allocator_does(monkeypatch, before, inside):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with fit_for_graphs():
        assert os.environ.get("NCCL_GRAPH_REGISTER") == inside
    assert os.environ.get("NCCL_GRAPH_REGISTER") == before.get("NCCL_GRAPH_REGISTER")


# -- kernels that draw


class Generator:
    """A generator of a device, as far as it is asked."""

    def __init__(self, seed=0):
        self.state = seed

    def manual_seed(self, seed):
        self.state = seed

    def get_state(self):
        return self.state

    set_state = manual_seed

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, other):
        self.state = other


def draw(generator, number):
    with drawing(generator, number):
        return generator.state


def test_each_call_of_a_graph_is_seeded_as_it_would_seed_the_device():
    """The same for a forward and its recomputation, which have one number; others have others."""
    device_wide, draws, numbers = Generator(5), Draws(), (11, 7, 11)
    assert [draw(device_wide, n + 100) for n in numbers] == [111, 107, 111]
    with draws.warming(100):
        assert [draw(device_wide, n + 100) for n in numbers] == [111, 107, 111]
    with draws.capturing(Generator):
        own = [draw(device_wide, n + 100) for n in numbers]
    assert own == draws.generators and device_wide.state == 5
    draws.seed(200)
    assert [generator.state for generator in draws.generators] == [211, 207, 211]
    draws.seed(LIMIT - 1)
    assert [generator.state for generator in draws.generators] == [10, 6, 10]


def test_the_matrix_would_see_a_seed_that_stands_still(recorder, monkeypatch):
    expected = train("eager", 4)
    monkeypatch.setattr(captured, "_advancing", lambda stage, seed, last: stage)
    with pytest.raises(AssertionError):
        assert_same(train("cuda_graph_eager", 4), expected)
