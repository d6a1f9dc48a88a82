"""A second start compiles nothing: what was compiled is on disk, and what is damaged is made again."""

import logging
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.lowering import inductor
from stepgraph.lowering.cache import entries, folder_of_cache
from stepgraph.planning.target import usual_target


class Stack(nn.Module):
    def __init__(self, width, layers, function):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.function = function

    def forward(self, x, y):
        for layer in self.layers:
            x = x + self.function(layer(x))
        return (x - y).square().mean()


def start(cache, settings, width=8, layers=6, function=torch.tanh, rows=4):
    """One process: losses, what inductor found and did not find, and what was said to be damaged."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("stepgraph").addHandler(handler)
    torch.manual_seed(0)
    model = Stack(width, layers, function)
    batch = {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = stepgraph.Engine(model, optimizer=optimizer, lowering="inductor", **settings)
    losses = [engine.step(batch).item() for _ in range(2)]
    found = counters["inductor"]
    damaged = [line for line in said if "damaged" in line]
    return losses, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], damaged


def alone(function, *arguments, **named):
    """A process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *arguments, **named).result()


def begin(cache, settings=(), **shape):
    return alone(start, str(cache), dict(settings), **shape)


def programs_run(cache):
    """What a start calls."""
    ran = []

    def hear(event, arguments):
        if event == "subprocess.Popen":
            ran.append(" ".join(map(str, arguments[1])))

    sys.addaudithook(hear)  # for good, in a process of its own
    start(cache, {})
    return ran


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def files():
    """Everything that is kept, with the times at which it was written."""
    root = folder_of_cache()
    found = (
        p for e in entries(root) for p in e.folder.rglob("*") if p.suffix in (".so", ".cpp", ".py")
    )
    return {path: path.stat().st_mtime_ns for path in found}


def test_the_second_start(cache):
    losses, hits, misses, damaged = begin(cache)
    assert misses > 2 and not hits and not damaged
    kept = files()
    assert len([path for path in kept if path.suffix == ".so"]) > 2
    assert begin(cache) == (losses, misses, 0, [])
    assert files() == kept
    ran = alone(programs_run, str(cache))
    assert not [command for command in ran if ".cpp" in command or ".hpp" in command]
    assert begin(cache, layers=8)[1]  # what repeats is the same at any depth

    of_graphs = [path for path in kept if any(path.parents[1].glob("fxgraph"))]
    flipped = next(path for path in of_graphs if path.suffix == ".so")
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 255
    flipped.write_bytes(content)
    again, _, misses, damaged = begin(cache)
    assert again == losses and misses == 1
    assert len(damaged) == 1 and flipped.name in damaged[0]


@pytest.mark.slow
def test_ranks_that_start_at_once_compile_a_thing_once(cache):
    settings = {"plan": "zero3"}
    results = launch(start, str(cache), settings, ranks=2)
    assert results[0][0] == results[1][0]
    made = sum(misses for _, _, misses, _ in results)
    assert made == len(entries(folder_of_cache())) - 1 > 2  # one is of the machine
    assert min(misses for _, _, misses, _ in results) > 0  # each compiled a part
    again = launch(start, str(cache), settings, ranks=2)
    assert [(losses, misses) for losses, _, misses, _ in again] == [(results[0][0], 0)] * 2
    new_shape = launch(partial(start, rows=8), str(cache), settings, ranks=2)
    assert all(hits for _, hits, _, _ in new_shape)  # what does not depend on it


@pytest.mark.parametrize("evaluate", [False, True])
def test_warming_up_compiles_and_runs_nothing(evaluate):
    torch.manual_seed(0)
    model = Stack(8, 2, torch.tanh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = stepgraph.Engine(model, optimizer=optimizer, lowering="eager")
    assert engine.warm_up(batch, evaluate=evaluate) > 0
    assert engine.stats.steps == 0 and engine.stats.compiles == 1 + evaluate
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value)
    with stepgraph.no_recompiles(after=0):
        engine.step(batch)
    engine.evaluate(batch)
    assert engine.stats.compiles == 2


class Named:
    """A cache that only says by what things are looked up."""

    def __init__(self):
        self.texts = []

    def compiled(self, wanted):
        self.texts += [text for text, _ in wanted if "machine" not in text]
        return [None] * len(wanted)


def texts_of(monkeypatch, width=8, layers=1, function=torch.tanh, **settings):
    named = Named()
    monkeypatch.setattr(inductor, "Cache", lambda: named)
    model = Stack(width, layers, function)
    batch = {"x": torch.randn(4, width), "y": torch.randn(4, width)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = stepgraph.Engine(model, optimizer=optimizer, lowering="inductor", **settings)
    engine.warm_up(batch, evaluate=False)
    return named.texts


@pytest.mark.slow
def test_another_program_is_a_miss(monkeypatch):
    texts = texts_of(monkeypatch)
    assert texts == texts_of(monkeypatch) and texts
    for changed in (
        {"width": 16},
        {"function": torch.sin},
        {"layers": 2},
        {"micro_batches": 2},
        {"max_grad_norm": 0.1},
        {"compute_dtype": torch.bfloat16},
    ):
        assert not {*texts} & {*texts_of(monkeypatch, **changed)}


def named(device, dtype=torch.float32):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, dtype=dtype, device=device)
    text, _ = inductor._wanted(torch.fx.GraphModule({}, graph), [x], usual_target("cpu"))
    return text


def test_another_device_and_another_version_are_misses(monkeypatch, cache):
    assert len({named("cpu"), named("cuda"), named("cpu", torch.float64)}) == 3
    cache = inductor.Cache(cache / "kept")
    for version in ("2.98.0", "2.99.0", "2.98.0"):
        monkeypatch.setattr(torch, "__version__", version)
        cache.compiled([("a", lambda: 1)])
    assert len(entries(cache.root)) == 2
