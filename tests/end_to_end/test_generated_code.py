"""What inductor makes of a step, read as text: no copy that the algorithm does not need."""

import itertools
import os
import re
import unittest.mock
from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.schedule import decide
from tests.end_to_end.test_engine import Regression, pairs
from tests.support import HOST, tiny_llama, token_batch

WIDTH = 640  # first.weight: 2560 elements, second.weight: 1280, first.bias: 640
# On one worker: what takes time is made once.
pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.slow]


LOOP = re.compile(
    r"for\(int64_t x0=.*?x0<static_cast<int64_t>\((\d+)L?\).*?\{(.*?)\n {8}\}", re.DOTALL
)


def generated_code(
    preset: str,
    apart: bool,
    llama: bool = False,
    lowering: str = "inductor",
    amsgrad: bool = False,
) -> str:
    """Trains a step on this rank and returns the code that inductor generated for it."""
    rank = int(os.environ.get("RANK", "0"))
    if llama:
        model, batch = tiny_llama(), token_batch(seed=rank)
    else:
        model, batch = Regression(width=WIDTH), pairs(seed=rank)
        model.second = torch.nn.Linear(WIDTH, 2)  # every parameter divides over two ranks
    engine = stepgraph.Engine(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=amsgrad),
        plan=preset,
        lowering=lowering,
    )
    # Every collective alone, as if each were large.
    sizes = decide.sizes_for(HOST)
    sizes = replace(sizes, large=0) if apart else sizes
    large = unittest.mock.patch.object(decide, "sizes_for", lambda target: sizes)
    with large, torch._inductor.config.patch(fx_graph_cache=False):  # a hit generates nothing
        _, codes = run_and_get_code(engine.step, batch)
    return "\n".join(codes)


SETTINGS = [
    ("ddp", True),
    ("zero1", True),
    ("zero3", True),
    ("ddp", False),
    ("ddp", False, False, "inductor", True),
    ("zero3", True, True),
    ("zero3", True, True, "inductor_whole"),
]


class Numbers(torch.nn.Module):
    """What is gathered is read by a kernel with loops of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.one = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale * self.one + self.frozen


def code_of_numbers() -> str:
    torch.manual_seed(0)
    model = Numbers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = stepgraph.Engine(
        model,
        optimizer=optimizer,
        plan="zero3",
        lowering="inductor",
        loss=lambda m, batch: torch.nn.functional.mse_loss(m(batch[0]), batch[1]),
    )
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(engine.step, (torch.randn(2, 6), torch.randn(2, 5)))
    return "\n".join(codes)


def generate_all() -> list[str]:
    return [*(generated_code(*setting) for setting in SETTINGS), code_of_numbers()]


@pytest.fixture(scope="module")
def codes() -> dict[tuple | str, str]:
    """Of each setting, in one launch: starting ranks takes longest."""
    return dict(zip([*SETTINGS, "numbers"], launch(generate_all, ranks=2)[0], strict=True))


def copied_elements(code: str) -> list[int]:
    """Sizes of the loops in generated kernels that store what they loaded, unchanged."""
    sizes = []
    for size, body in LOOP.findall(code):
        loaded = re.findall(r"auto (tmp\d+) = .*?in_ptr\d+", body)
        computed = re.findall(r"auto (tmp\d+) = ", body)
        stores = re.findall(r"(?:(tmp\d+)\.store\(out_ptr|out_ptr\d+\[.*?\] = (tmp\d+))", body)
        stored = [a or b for a, b in stores]
        if stored and set(computed) == set(loaded) and set(stored) <= set(loaded):
            sizes.append(int(size))
    return sizes


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_no_copy_of_a_parameter_is_left(preset, codes):
    code = codes[preset, True]
    assert max(copied_elements(code), default=0) < 640, copied_elements(code)
    body = code.split("def call(self, args):")[-1]
    assert "copy_(" not in body
    gathers = re.findall(r"all_gather_into_tensor(\w*)\.default\(.*", body)
    if preset == "zero1":  # new parameters are gathered straight into the parameters
        assert gathers == ["_out"] * 4
        assert len(re.findall(r"all_gather_into_tensor_out.*out=arg\d+_1\)", body)) == 4


def test_merged_collectives_copy_each_gradient_once(codes):
    body = codes["ddp", False].split("def call(self, args):")[-1]
    assert len(re.findall(r"all_reduce_?\.default\(", body)) <= 2  # gradients, and the loss


def check_order(code: str, at_least: int) -> None:
    count = 0
    for body in code.split("def call(self, args):")[1:]:  # a graph each
        calls = re.findall(r"torch\.ops\._c10d_functional\.(wait)?\w*\.default\(", body)
        assert not any(a == b for a, b in itertools.pairwise(calls))
        count += len(calls)
    assert count > at_least


def test_on_the_host_no_two_collectives_are_in_flight(codes):
    """Inductor's own order starts several gathers before it awaits the first."""
    check_order(codes["zero3", True, True, "inductor_whole"], 40)
    check_order(codes["zero3", True, True], 20)


@pytest.mark.slow
def test_nor_under_zero1():
    check_order(launch(generated_code, "zero1", True, True, "inductor_whole", ranks=2)[0], 40)


def test_adams_bias_correction_is_computed_once_not_per_element(codes):
    code = codes["ddp", False, False, "inductor", True]
    assert "std::pow" in code
    inside = "".join(body for _, body in LOOP.findall(code))
    assert ".sqrt()" in inside
    assert "std::pow" not in inside


def test_adam_is_torchs_kernel_once_for_all_parameters(codes):
    code = codes["ddp", False]
    assert code.count("torch.ops.stepgraph.fused_adam_.default(") == 1
    assert "std::pow" not in code


@pytest.mark.parametrize("setting", ["numbers", ("zero3", True), ("zero3", True, True)])
def test_nothing_is_read_before_it_is_awaited(setting, codes):
    """Inductor forgets it where it makes the loops of a kernel anew (torch 2.13)."""
    gathered = 0
    for body in codes[setting].split("def call(self, args):")[1:]:
        on_its_way: set[str] = set()
        for line in body.splitlines():
            if "wait_tensor.default(" in line:
                on_its_way -= {*re.findall(r"wait_tensor\.default\((\w+)\)", line)}
            elif made := re.match(r"\s+(\w+) = torch\.ops\._c10d_functional\.\w+\.default", line):
                on_its_way.add(made[1])
                gathered += 1
            elif not line.strip().startswith(("del ", "assert_", "return ")):
                assert not on_its_way & {*re.findall(r"\w+", line)}, line
    assert gathered
