"""memory_timeline: what it predicts is what interpreting the program allocates."""

import operator

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.program.program import BACKWARD
from tests.cost.hand_made import Written
from tests.sampling import sampled
from tests.support import adamw, compiled, mlp, regression_batch, tiny_llama, token_batch, values

aten = torch.ops.aten
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


def measured_peak(program, model, batch, optimizer):
    """Largest number of bytes in distinct storages that are alive at once, values dying when unread."""
    inputs = values(model, batch, optimizer)
    rows = zip(program.placeholders, program.inputs, program.input_values, strict=True)
    alive = {node: inputs.of(role, value).clone() for node, role, value in rows}
    held = set(alive)
    last = {}
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    peak = 0
    for node in program.operations():
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), alive.__getitem__)
        alive[node] = (
            args[0] if node.target is torch_internals.WAIT else node.target(*args, **kwargs)
        )
        tensors = torch.utils._pytree.tree_leaves(list(alive.values()))
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if isinstance(t, torch.Tensor)
        }
        peak = max(peak, sum(storages.values()))
        for source in [*node.all_input_nodes, node]:
            if source not in held and last.get(source, node) is node:
                alive.pop(source, None)
    return peak


@pytest.mark.parametrize(
    ("kind", "memory"),
    sampled(
        [("mlp", "none"), ("transformer", "full"), ("mlp", "full"), ("transformer", "none")], 3
    ),
)
def test_the_predicted_peak_is_within_five_percent_of_the_measured_one(kind, memory):
    if kind == "mlp":
        model, batch = mlp(), regression_batch(rows=240)
    else:
        model, batch = tiny_llama(2), token_batch(length=24)
    optimizer = adamw(model)
    program = compiled(model, batch, optimizer, memory=memory).programs["step"]
    predicted = memory_timeline(program).peak()
    measured = measured_peak(write_state_in_place(program.copy()), model, batch, optimizer)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.fixture(scope="module")
def timelines():
    model, batch = tiny_llama(2), token_batch(length=24)
    optimizer = adamw(model)
    return {
        (plan, memory): memory_timeline(
            compiled(model, batch, optimizer, ranks=4, plan=plan, memory=memory).programs["step"]
        )
        for plan, memory in (("ddp", "none"), ("zero3", "none"), ("zero3", "full"))
    }


def test_every_byte_has_a_category_and_none_is_negative(timelines):
    for timeline in timelines.values():
        assert all(set(alive) == set(CATEGORIES) for alive in timeline.at)
        assert min(size for alive in timeline.at for size in alive.values()) >= 0


def test_sharding_divides_parameters_and_optimizer_states(timelines):
    whole, sharded = timelines["ddp", "none"], timelines["zero3", "none"]
    for category in ("parameters", "optimizer"):
        assert sharded.peak_of(category) < 0.4 * whole.peak_of(category)


def test_recomputing_keeps_fewer_activations(timelines):
    kept, recomputed = timelines["zero3", "none"], timelines["zero3", "full"]
    assert recomputed.peak_of("activations") < 0.6 * kept.peak_of("activations")


def test_inputs_live_throughout(timelines):
    timeline = timelines["ddp", "none"]
    for category in ("parameters", "optimizer", "inputs"):
        assert len({alive[category] for alive in timeline.at}) == 1


def test_a_peak_can_be_asked_of_a_phase_and_without_categories(timelines):
    timeline = timelines["ddp", "none"]
    assert timeline.peak(BACKWARD) <= timeline.peak()
    assert timeline.peak(without=("parameters",)) < timeline.peak()
    assert timeline.peak(without=CATEGORIES) == 0


def test_a_result_that_nobody_reads_any_more_dies_though_its_neighbour_lives():
    write = Written({"x": (64, 64)})
    norm = write(aten.native_layer_norm.default, write["x"], [64], None, None, 1e-5)
    parts = [write(operator.getitem, norm, i) for i in range(3)]
    total = write(aten.sum.default, parts[0])
    later = write(aten.add.Tensor, parts[1], 1.0)
    program = write.returning(total, later)
    held, big, small = 4 * 64 * 64, 4 * 64 * 64, 4 * 64
    totals = [sum(alive.values()) for alive in memory_timeline(program).at]
    assert totals[0] == held + big + 2 * small
    assert totals[-1] == held + small + 4 + small  # the norm is gone, and so is its other statistic


def test_a_collective_holds_what_it_reads_until_its_wait():
    write = Written({"x": (64, 64)}, mesh="dp=2")
    given = write(aten.neg.default, write["x"])
    gathered = write(torch_internals.ALL_GATHER, given, 2, "dp")
    between = write(aten.exp.default, write["x"])
    program = write.returning(between, write(torch_internals.WAIT, gathered))
    totals = [sum(alive.values()) // (4 * 64 * 64) for alive in memory_timeline(program).at]
    assert totals == [2, 4, 5, 5]


def test_an_all_reduce_sends_a_copy():
    write = Written({"x": (64, 64)}, mesh="dp=2")
    given = write(aten.neg.default, write["x"])
    reduced = write(torch_internals.ALL_REDUCE, given, "sum", "dp")
    between = write(aten.exp.default, write["x"])
    program = write.returning(between, write(torch_internals.WAIT, reduced))
    totals = [sum(alive.values()) // (4 * 64 * 64) for alive in memory_timeline(program).at]
    assert totals == [2, 3, 3, 3]


def test_gloo_copies_what_it_gathers_and_scatters():
    write = Written({"x": (64, 64)}, mesh="dp=2")
    gathered = write(torch_internals.ALL_GATHER, write["x"], 2, "dp")
    between = write(aten.exp.default, write["x"])
    whole = write(torch_internals.WAIT, gathered)
    part = write(torch_internals.REDUCE_SCATTER, whole, "sum", 2, "dp")
    program = write.returning(between, write(torch_internals.WAIT, part))
    line = memory_timeline(program)
    assert [size // (4 * 64 * 64) for size in line.copied] == [2, 2, 2, 2, 2]
    assert line.resident == line.peak() + 2 * 4 * 64 * 64 and line.on_host == 0
    assert line.peak() == 5 * 4 * 64 * 64


@pytest.mark.parametrize("copies", [False, True])
def test_a_reshape_is_a_view_unless_the_layout_makes_it_copy(copies):
    write = Written({"x": (64, 32)})
    made = write(aten.neg.default, write["x"])
    source = write(aten.t.default, made) if copies else made
    program = write.returning(write(aten.reshape.default, source, [64 * 32]))
    assert memory_timeline(program).peak() == (3 if copies else 2) * 4 * 64 * 32


def test_constants_of_the_graph_are_counted():
    write = Written({"x": (4,)})
    write.program.module.register_buffer("constant", torch.zeros(16))
    with write.program.graph.inserting_after(write["x"]):
        constant = write.program.graph.get_attr("constant")
    constant.meta = {"val": torch.empty(16, device="meta"), "phase": "forward", "name": "constant"}
    program = write.returning(write(aten.neg.default, write["x"]))
    assert memory_timeline(program).peak() == 4 * (4 + 16 + 4)
