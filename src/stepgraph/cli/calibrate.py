"""Measures this machine into the file that the cost model reads: ``stepgraph doctor --calibrate``.

A rate is measured on one rank; collectives on two, with computation in between, as they stand in a step.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from stepgraph import torch_internals
from stepgraph.api.engine import Engine
from stepgraph.cli import launcher
from stepgraph.cli.timing import SECONDS, Timer
from stepgraph.cost.calibration import calibration_file, to_json
from stepgraph.cost.device import Device, Link
from stepgraph.cost.devices import DEVICES
from stepgraph.pipeline import foresee
from stepgraph.program.randomness import BITS, RANDOM, seed_words
from stepgraph.runtime.files import whole_file
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

NOT_COMPARED = "measured rates, but predictions were not compared with runs on this machine"
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
_SIZES = [2**n for n in range(16, 27)]  # bytes of one operand
_MESSAGES = [2**n for n in (10, 13, 16, 18, 20, 22, 24)]  # bytes of a collective's larger side
_RANKS, _REPEATS = 2, 60


def calibrate(progress: Callable[[str], None] = lambda name: None) -> Path:
    """Measures the device of this machine's first rank, and writes the calibration file.

    That is ``$STEPGRAPH_CALIBRATION``, else in the user's cache.

    Raises:
        LaunchError: ranks could not be started.
    """
    device = measure(launcher.rank_device(), progress)
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        unfinished.write_text(to_json({device.name: device}))
    return path


def measure(where: torch.device, progress: Callable[[str], None]) -> Device:
    """A Device from measurements; takes less than a minute."""
    is_host = where.type == torch.Generator().device.type
    timer = Timer(where)
    with torch.no_grad():
        progress("calls")
        call = timer.usual(lambda x: x + 1, timer.operands(1))
        progress("matrix products")
        matmul, half_flops = _products(timer, call)
        progress("attention and convolution")
        families = _families(timer, matmul[torch.float32], call)
        progress("memory")
        caches = _bandwidths(timer, call)
        progress("other operations")
        elements = _elements(timer, call)
    progress(f"{_RANKS} ranks")
    links, crowding = _ranks() if is_host or torch.cuda.device_count() >= _RANKS else ({}, 1.0)
    typical = DEVICES["h100"]  # its links, where there is one device only
    slowest = max(links.values(), key=lambda link: link.latency, default=typical.intra)
    where_it_ran = (
        f"{torch.get_num_threads()} threads a rank"
        if is_host
        else torch.cuda.get_device_name(where)
    )
    device = Device(
        name=where.type,
        matmul=matmul,
        peak=matmul,
        memory_bandwidth=caches[-1][1],
        capacity=launcher.memory_bytes(where),
        intra=slowest,
        inter=slowest if is_host else typical.inter,
        ranks_per_node=64 if is_host else max(1, torch.cuda.device_count()),
        kernel_seconds=call,
        half_flops=half_flops,
        half_bytes=0.0 if is_host else call * caches[-1][1],
        overlaps=not is_host,
        source=f"stepgraph doctor --calibrate, {where_it_ran}, torch {torch.__version__}",
        error=NOT_COMPARED,
        families=families,
        elements=elements,
        caches=tuple(caches),
        collectives=links,
        crowding=crowding,
        host=None if is_host else typical.host,
    )
    if is_host:
        progress("small steps")
        device = replace(device, dispatch_seconds=_dispatch_seconds(device))
    return device


# -- one rank


def _products(timer: Timer, call: float) -> tuple[dict[torch.dtype, float], float]:
    """FLOP/s by type, and the FLOPs at which float32 reaches half of it."""
    scale = 8 if timer.waits else 1
    rows = []
    for m, k, n in (
        (32, 32, 32), (64, 64, 64), (128, 128, 128), (256, 192, 512), (512, 192, 192),
        (192, 512, 192), (512, 512, 512), (256, 1024, 1024), (1024, 256, 1024),
    ):  # fmt: skip
        m, k, n = m * scale, k * scale, n * scale
        given = timer.operands(m, k), timer.operands(k, n)
        seconds = timer.usual(torch.mm, *given, seconds=3 * SECONDS)
        rows.append((2.0 * m * k * n, max(seconds - call, seconds / 10)))
    constant, slope = fit_line(rows)
    rates = {torch.float32: 1 / slope}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        size = 256 * scale
        operands = timer.operands(size, size, dtype=dtype)
        rates[dtype] = 2.0 * size**3 / timer.usual(torch.mm, operands, operands[1:] + operands[:1])
    return rates, constant / slope


def fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope) of seconds over size, both above 0, relative errors counting alike."""
    sizes, seconds = (np.array(column) for column in zip(*rows, strict=True))
    constant, slope = np.linalg.lstsq(
        np.stack([1 / seconds, sizes / seconds], 1), np.ones(len(rows)), rcond=None
    )[0]
    if constant <= 0 or slope <= 0:  # noise: the largest size says the slope
        slope = seconds[-1] / sizes[-1]
        constant = max(float(np.min(seconds - slope * sizes)), seconds[0] / 100)
    return float(constant), float(slope)


def _families(timer: Timer, rate: float, call: float) -> dict[str, float]:
    """Rates of other products over that of plain ones."""
    found = {}
    left, right = timer.operands(24, 128, 32), timer.operands(24, 32, 128)
    flops = 2.0 * 24 * 128 * 128 * 32
    found["batched"] = flops / timer.usual(torch.bmm, left, right)

    rows = [timer.operands(8, 4, 128, 32), timer.operands(4, 4, 256, 64)]
    for name, causal in (("attention", False), ("attention_causal", True)):
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        found |= _forward_and_backward(timer, name, attend, [(r, r, r) for r in rows], 2.5)

    convolve = functools.partial(F.conv2d, padding=1)
    shapes = [
        (timer.operands(16, c, s, s), timer.operands(c, c, 3, 3)) for c, s in ((32, 32), (64, 16))
    ]
    found |= _forward_and_backward(timer, "convolution", convolve, shapes, 2.0)
    return {family: value / rate for family, value in found.items()}


def _forward_and_backward(
    timer: Timer, name: str, call: Callable, shapes: list[tuple], backward: float
) -> dict[str, float]:
    """FLOP/s of a product and of its backward, which does ``backward`` times as much."""
    forwards, backwards = [], []
    for operands in shapes:
        flops = _flops(call, [given[0] for given in operands])
        flops /= 2 if name.endswith("causal") else 1
        forward = timer.usual(call, *operands)
        forwards.append(flops / forward)
        backwards.append(flops * backward / _backward_seconds(timer, call, operands, forward))
    return {name: statistics.mean(forwards), f"{name}_backward": statistics.mean(backwards)}


def _backward_seconds(timer: Timer, call: Callable, operands: tuple, forward: float) -> float:
    """Time of the backward of a function, of which the forward takes ``forward``."""
    tangent = torch.ones_like(call(*(given[0] for given in operands)))

    def both(*given: torch.Tensor) -> None:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in given]
            torch.autograd.backward(call(*leaves), tangent)

    return max(timer.usual(both, *operands) - forward, forward / 10)


def _flops(call: Callable, operands: list[torch.Tensor]) -> float:
    if len(operands) == 3:  # queries x keys x width, twice
        batch, heads, length, width = operands[0].shape
        return 4.0 * batch * heads * length * length * width
    result, weight = call(*operands), operands[1]
    return 2.0 * result.numel() * weight[0].numel()


def _bandwidths(timer: Timer, call: float) -> list[tuple[float, float]]:
    """(bytes touched, bytes/s) of an addition, sizes ascending."""
    rows = []
    for size in _SIZES:
        operands = timer.operands(size // 4)
        seconds = timer.usual(torch.add, operands, operands[1:] + operands[:1])
        rows.append((3.0 * size, 3.0 * size / max(seconds - call, seconds / 5)))
    return rows


def _elements(timer: Timer, call: float) -> dict[str, float]:
    """Seconds an element of operations that may compute more than they move."""
    wide, image = (512, 512), (16, 32, 16, 32)
    weight, bias = torch.ones(32, device=timer.where), torch.zeros(32, device=timer.where)
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)

    def batch_norm(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, training=True)

    calls: dict[str, tuple[Callable, tuple[int, ...]]] = {
        "exp": (F.silu, wide),
        "tanh": (torch.tanh, wide),
        "gelu": (F.gelu, wide),
        "trigonometric": (torch.cos, wide),
        "power": (lambda x: x**3, wide),
        "root": (torch.sqrt, wide),
        "softmax": (lambda x: torch.softmax(x, -1), wide),
        "safe_softmax": (lambda x: private.safe_softmax(x, -1), wide),
        "transposition": (lambda x: x.t().contiguous(), wide),
        "log_softmax": (lambda x: torch.log_softmax(x, -1), wide),
        "reduction": (lambda x: (x.sum(0), x.mean(-1)), wide),
        "layer_norm": (lambda x: F.layer_norm(x, (512,)), wide),
        "batch_norm": (batch_norm, image),
        "conversion": (lambda x: (x < 1).to(x.dtype), wide),
        "concatenation": (lambda x: torch.cat([x, x], 1), (512, 256)),
        "pooling": (lambda x: F.max_pool2d(x, 2), image),
    }
    found, count = {}, torch.Size(wide).numel()
    for name, (function, shape) in calls.items():
        operands = [tensor.abs() for tensor in timer.operands(*shape)]  # a NaN may take longer
        seconds = timer.usual(function, operands, seconds=SECONDS / 2)
        calls_made = 2 if name in ("reduction", "conversion") else 1
        each = seconds / calls_made - call
        found[name] = max(each, seconds / 10) / count
    kept = torch.rand(wide, device=timer.where) < 0.9
    gradients = timer.operands(*wide)
    masked = timer.usual(lambda x: aten.native_dropout_backward(x, kept, 1.1), gradients)
    found["masking"] = max(masked - call, masked / 10) / count
    seed = seed_words(1, 2, 0).to(timer.where)
    bits = lambda s: RANDOM(s, BITS, 0, list(wide), list(wide), [0, 0], [], "")  # noqa: E731
    found["random"] = timer.usual(bits, [seed]) / count
    for name in ("softmax", "batch_norm", "gelu"):
        function, shape = calls[name]
        forward = found[name] * count + call
        backward = _backward_seconds(timer, function, (timer.operands(*shape),), forward)
        found[f"{name}_backward"] = backward / count
    return found


def _dispatch_seconds(device: Device) -> float:
    """Host time of one operation, Python and allocation included: what kernels leave of small steps."""
    found = []
    for width, layers in ((64, 8), (128, 6), (192, 6)):
        engine, batch = _small_step(width, layers)
        seconds = Timer(batch.device).usual(engine.step, [batch], seconds=1.0)
        once, twice = (
            foresee(engine.programs, replace(device, dispatch_seconds=each), "eager").step_ms / 1e3
            for each in (1.0, 2.0)
        )
        operations = twice - once  # at a second each
        found.append(max(seconds - (once - operations), 0.0) / operations)
    return statistics.mean(found)


def _small_step(width: int, layers: int) -> tuple[Engine, torch.Tensor]:
    """An engine that trains a small module, ready to be timed, and its batch."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        for _ in range(layers)
    ]
    model, batch = nn.Sequential(*blocks), torch.randn(256, width)
    engine = Engine(
        model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        mesh="dp=1",
        plan="ddp",
        lowering="eager",
    )
    engine.step(batch)
    return engine, batch


# -- several ranks


def _ranks() -> tuple[dict[str, Link], float]:
    """Links by kind of collective, and how much ranks slow each other down."""
    rows, crowding = launcher.launch(measure_ranks, ranks=_RANKS)[0]
    links = {}
    for kind, points in rows.items():
        constant, slope = fit_line(points)
        passes = _PASSES[kind]
        links[kind] = Link(constant / passes, passes * (_RANKS - 1) / _RANKS / slope)
    return links, crowding


def measure_ranks() -> tuple[dict[str, list[tuple[float, float]]], float]:
    """On every rank: (bytes, seconds) of collectives by kind, and the slowdown of crowded ranks."""
    timer = Timer(launcher.rank_device())
    with torch.no_grad():
        crowding = _crowding(timer)
        return _collectives(timer), crowding


def _collectives(timer: Timer) -> dict[str, list[tuple[float, float]]]:
    """What collectives add on this rank as they stand in a step: computation in between.

    Back to back they take a fraction of it: nobody has to be woken, and no rank waits for another one.
    """
    ranks = dist.get_world_size()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    left = timer.operands(384, 384)[0]
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "": lambda x: None,
        "all_gather": lambda x: torch_internals.gather_over_group(x, ranks, group),
        "reduce_scatter": lambda x: torch_internals.scatter_sum_over_group(x, ranks, group),
        "all_reduce": lambda x: torch_internals.sum_over_group(x, group),
    }

    def work(kind: str, given: torch.Tensor) -> tuple:
        return torch.mm(left, left), torch.mm(left, left), calls[kind](given)

    works = {}
    for kind, size in itertools.product(calls, _MESSAGES):
        part = size // ranks if kind == "all_gather" else size
        given = torch.ones(part // 4, device=timer.where)
        works[kind, size] = functools.partial(work, kind, given)
    dist.barrier()
    seconds = timer.in_turns(works, _REPEATS)
    alone = statistics.median(seconds.pop(("", size)) for size in _MESSAGES)
    rows: dict[str, list[tuple[float, float]]] = {}
    for (kind, size), each in seconds.items():
        rows.setdefault(kind, []).append((float(size), max(each - alone, 1e-6)))
    return rows


def _crowding(timer: Timer) -> float:
    """Time of a mixed piece of work while all ranks do it, over its time on one alone."""
    left, x = timer.operands(256, 256), timer.operands(2**18)

    def work(left: torch.Tensor, x: torch.Tensor) -> None:
        torch.mm(left, left)
        F.gelu(x + x)

    alone = torch.zeros(1, device=timer.where)
    if dist.get_rank() == 0:
        alone += timer.usual(work, left, x, seconds=0.5)
    dist.broadcast(alone, 0)
    together = torch.full((1,), timer.usual(work, left, x, seconds=0.5), device=timer.where)
    dist.all_reduce(together)
    return max(1.0, (together / dist.get_world_size() / alone).item())
