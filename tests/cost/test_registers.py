"""find_registers: what a fusing compiler never puts in memory; and never less than a step takes."""

import torch

from stepgraph import Engine, pipeline, plan, torch_internals
from stepgraph.cost.memory import memory_timeline
from stepgraph.cost.registers import find_registers
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD
from tests.allocated_memory import allocated_peak, bytes_between_steps
from tests.cost.hand_made import Written
from tests.support import adamw, tiny_llama

aten = torch.ops.aten


def names(program):
    found = find_registers(program)
    over = {meta(new)["name"]: meta(old)["name"] for new, old in found.over.items()}
    return {meta(node)["name"] for node in found.until}, over


def test_what_runs_as_one_kernel_is_in_no_memory():
    write = Written({"x": (8, 8)})
    a = write(aten.add.Tensor, write["x"], 1.0)
    b = write(aten.t.default, write(aten.mul.Tensor, a, write["x"]))
    program = write.returning(write(aten.tanh.default, b))
    assert names(program) == ({"add", "mul"}, {})
    assert memory_timeline(program, fused=True).peak() == 2 * 256
    assert memory_timeline(program).peak() == 3 * 256


def test_what_a_product_reads_is_in_memory():
    write = Written({"x": (8, 8)})
    a = write(aten.neg.default, write["x"])
    program = write.returning(write(aten.mm.default, a, write["x"]))
    assert names(program) == (set(), {})


def behind_products(write, value):
    """A value that is made of another one, so far on that this is not nearby."""
    for _ in range(4):
        value = write(aten.mm.default, value, write["x"])
    return value


def gated(keeps_the_product, device="meta"):
    """A gate that the backward reads, far behind; and whether that reads what the gate is made of."""
    write = Written({"x": lambda: torch.empty(8, 8, device=device)})
    x = write["x"]
    product = write(aten.mm.default, x, x)
    gate = write(aten.silu.default, product)
    forward = write(aten.mul.Tensor, gate, write(aten.mm.default, x, x))
    forward = behind_products(write, forward)
    write.phase = BACKWARD
    backward = write(aten.mul.Tensor, forward, gate)
    backward = write(aten.mm.default, write(aten.mm.default, backward, x), x)
    if keeps_the_product:
        backward = write(aten.silu_backward.default, backward, product)
    return write.returning(backward)


def test_what_a_later_kernel_reads_is_computed_again_if_its_operands_are_there():
    assert "silu" in names(gated(True))[0]
    assert "silu" not in names(gated(False))[0]


def test_the_host_computes_an_exponential_once_for_several():
    assert "silu" not in names(gated(True, torch_internals.host_device()))[0]


def test_a_softmax_is_kept_for_a_backward_behind_products():
    write = Written({"x": lambda: torch.empty(8, 8, device="meta")})
    a = write(aten._softmax.default, write["x"], -1, False)
    b = behind_products(write, write["x"])
    program = write.returning(write(aten._softmax_backward_data.default, b, a, -1, torch.float32))
    assert names(program) == (set(), {})


def test_what_is_read_into_something_larger_is_read_several_times():
    write = Written({"y": (8, 8, 8)} | dict.fromkeys("abcdef", (8, 8)))
    a = write["a"]
    for name in "bcdef":  # six reads: too much for several readers
        a = write(aten.add.Tensor, a, write[name])
    row = write(aten.unsqueeze.default, write(aten.neg.default, a), 0)
    wide = write.returning(write(aten.mul.Tensor, row, write["y"]))
    assert "neg" not in names(wide)[0]


def test_what_a_trained_parameter_makes_is_kept_for_a_later_piece():
    """A piece of a program does not read again what the update may have written."""

    def inlined(trains):
        write = Written(dict.fromkeys("xw", lambda: torch.empty(8, 8, device="meta")))
        x, w = write["x"], write["w"]
        scaled = write(aten.mul.Tensor, x, w)
        forward = behind_products(write, write(aten.sin.default, scaled))
        write.phase = BACKWARD
        backward = write(aten.mul.Tensor, forward, scaled)
        backward = write(aten.mul.Tensor, write(aten.mul.Tensor, backward, x), w)
        if trains:
            write(torch_internals.mutable_copy, w, backward)
        return "mul" in names(write.returning(backward))[0]

    assert inlined(trains=False) and not inlined(trains=True)


def test_joined_parts_are_in_memory():
    write = Written({"x": (8, 8)})
    joined = write(aten.cat.default, [write["x"], write(aten.neg.default, write["x"])])
    program = write.returning(write(aten.exp.default, joined))
    inside, over = names(program)
    assert "cat" not in inside and not over


def test_a_result_lies_where_a_fused_kernel_was_the_last_to_read():
    write = Written(dict.fromkeys("abcdef", (8, 8)))
    total = write["a"]
    for name in "bcdef":  # the sum reads too much to be computed for both of its readers
        total = write(aten.add.Tensor, total, write[name])
    more = write(aten.mul.Tensor, total, write(aten.neg.default, total))
    program = write.returning(more)
    assert names(program)[1] == {"mul": "add.4"}
    assert memory_timeline(program, fused=True).peak() == 7 * 256
    # What is computed anew is nowhere.
    write = Written({"x": (8, 8)})
    a = write(aten.neg.default, write["x"])
    program = write.returning(write(aten.mul.Tensor, a, write(aten.sum.dim_IntList, a, [0])))
    assert names(program) == ({"neg"}, {})
    # What a product made might be what a compiled piece is given, which it does not write over.
    write = Written({"x": (8, 8)})
    product = write(aten.mm.default, write["x"], write["x"])
    assert names(write.returning(write(aten.neg.default, product))) == (set(), {})


def test_what_leaves_the_program_is_in_memory():
    write = Written({"x": (8, 8)})
    a = write(aten.neg.default, write["x"])
    assert names(write.returning(a, write(aten.exp.default, a))) == (set(), {})


def test_what_reads_too_much_is_written_down():
    inputs = {f"x{i}": (8, 8) for i in range(12)}
    write = Written(inputs)
    total = write["x0"]
    for name in list(inputs)[1:]:
        total = write(aten.add.Tensor, total, write[name])
    inside, _ = names(write.returning(write(aten.exp.default, total)))
    assert 0 < len(inside) < 11


def in_pieces(product_is_anew):
    """A product of two that a layer's backward reads, in another piece, in front of its own product."""
    write = Written({"x": (8, 8)})
    x = write["x"]
    gate = write(aten.mm.default, x, x)
    both = write(aten.mul.Tensor, gate, x)
    forward = behind_products(write, both)
    write.phase = BACKWARD
    other = write(aten.exp.default, gate)
    last = write(aten.mm.default, write(aten.mm.default, forward, both), other)
    program = write.returning(last)
    for node in program.operations():
        meta(node)["piece"] = int(meta(node)["phase"] == BACKWARD)
    if product_is_anew:
        meta(both)["anew_in"] = (1,)
    return program


def test_what_a_piece_computes_anew_is_not_there_in_between():
    kept, anew = (memory_timeline(in_pieces(is_anew), fused=True).at for is_anew in (False, True))
    bytes_of = [[sum(now.values()) // 256 for now in at] for at in (kept, anew)]
    # The gate; the product of both; four behind it; exp, and anew beside it the product of both; two more.
    assert bytes_of[0] == [2, 3, 4, 5, 5, 5, 5, 5, 4]
    assert bytes_of[1] == [2, 3, 4, 4, 4, 4, 5, 6, 4]


def test_it_is_there_before_all_that_read_it():
    """Also where something else is computed anew of it that stands earlier, and is read later."""
    write = Written({"x": (8, 8)})
    x = write["x"]
    first = write(aten.neg.default, x)
    second = write(aten.exp.default, first)
    write.phase = BACKWARD
    early = write(aten.mm.default, first, x)
    late = write(aten.mm.default, write(aten.mm.default, early, x), second)
    program = write.returning(late)
    for node in program.operations():
        meta(node)["piece"] = int(meta(node)["phase"] == BACKWARD)
    for node in (first, second):
        meta(node)["anew_in"] = (1,)
    found = find_registers(program).anew
    order = list(program.operations())
    assert found[1, first].begin <= order.index(early)
    assert found[1, second].end == order.index(late)


def test_what_a_piece_hands_on_is_in_memory():
    write = Written({"x": (8, 8)})
    neg = write(aten.neg.default, write["x"])
    program = write.returning(write(aten.exp.default, neg))
    assert names(program) == ({"neg"}, {})
    meta(neg)["piece"], meta(program.results[0])["piece"] = 0, 1
    assert names(program)[0] == set()
    meta(neg)["anew_in"] = (1,)
    found = find_registers(program)
    assert not found.anew[1, neg].in_memory and found.anew[1, neg].until == 1


def test_a_compiled_step_takes_what_is_predicted():
    """By what the allocator gives out; as if every operation wrote its result it is much too much."""
    model = tiny_llama(2, vocab_size=2000, max_position_embeddings=128)
    ids = torch.randint(2000, (8, 128))
    batch, optimizer = {"input_ids": ids, "labels": ids.clone()}, adamw(model)
    asked = {"mesh": "dp=1", "placement": "ddp", "device": "cpu", "compute_dtype": None}
    planned = plan(model, example=batch, optimizer=optimizer, **asked)
    programs = planned.programs(model, example=batch, optimizer=optimizer)
    step = pipeline.as_executed(programs, "inductor")["step"]
    predicted, one_by_one = (memory_timeline(step, fused).peak() for fused in (True, False))
    engine = Engine(model, optimizer=optimizer, plan="ddp", lowering="inductor")
    for _ in range(2):
        engine.step(batch)
    above = allocated_peak(lambda: engine.step(batch))
    measured = above + bytes_between_steps(model, optimizer, batch)
    assert planned.predicted.peak_bytes == predicted
    assert 0.99 < predicted / measured < 1.01
    assert one_by_one / measured > 1.4
    assert f"peak {show_bytes(predicted)} a rank" in engine.report()
