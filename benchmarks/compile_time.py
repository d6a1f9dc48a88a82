"""CPU seconds to the end of the first training step, by depth: stepgraph beside torch.compile.

    python benchmarks/compile_time.py --depths 2,4,8,16,32 --json benchmarks/results/compile_time.json
    python benchmarks/compile_time.py --draw benchmarks/results/compile_time.json  # an .svg beside it

A run is a process of its own with an empty compiler cache; children count, imports do not. Contestants
take turns. ``stepgraph`` is one process under ``ddp``, ``whole`` the same with
``lowering="inductor_whole"``, ``eager`` the same without a compiler: capture, passes and one step.
``torch.compile`` compiles the model as a whole, ``block by block`` each layer, the norm, the head and the
loss; both compile the optimizer's step.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LOWERINGS = {"stepgraph": "inductor", "whole": "inductor_whole", "eager": "eager"}
CONTESTANTS = ("stepgraph", "whole", "eager", "torch.compile", "block by block")
VOCABULARY, ROWS, TOKENS = 1024, 4, 64


def model_of(depth: int, width: int) -> torch.nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=depth, use_cache=False, **shape, **heads))


def cpu_seconds() -> float:
    """Of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def stepper(name: str, model: torch.nn.Module) -> Callable[[dict], torch.Tensor]:
    """One training step of a contestant."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name in LOWERINGS:
        import stepgraph

        engine = stepgraph.Engine(
            model,
            loss=lambda m, batch: m(**batch).loss,
            optimizer=optimizer,
            plan="ddp",
            lowering=LOWERINGS[name],
        )
        return engine.step
    update = torch.compile(optimizer.step)
    if name == "torch.compile":
        whole = torch.compile(model)

        def loss_of(batch: dict) -> torch.Tensor:
            return whole(**batch).loss
    else:
        for module in [*model.model.layers, model.model.norm, model.lm_head]:
            module.compile()
        criterion = torch.compile(model.loss_function)

        def loss_of(batch: dict) -> torch.Tensor:
            return criterion(
                model(input_ids=batch["input_ids"]).logits, batch["labels"], VOCABULARY
            )

    def step(batch: dict) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run(name: str, depth: int, width: int) -> dict[str, Any]:
    """In a process of its own."""
    import torch._inductor.compile_fx
    import transformers.models.llama.modeling_llama  # noqa: F401

    import stepgraph  # noqa: F401

    torch.set_num_threads(1)
    model = model_of(depth, width)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    before, start = cpu_seconds(), time.perf_counter()
    step = stepper(name, model)
    first = step(batch).item()
    record = {"cpu_s": cpu_seconds() - before, "wall_s": time.perf_counter() - start, "loss": first}
    times = []
    for _ in range(15):
        start = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - start))
    record["step_ms"] = statistics.median(times[3:])
    record["files"] = generated(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    record["kernels"] = sum(".main." in name or ".kernel." in name for name in record["files"])
    return record


def generated(cache: Path) -> dict[str, str]:
    """The C++ files that inductor wrote: their bytes, and the seconds from there to their library.

    Several are compiled at a time, so their seconds overlap. Those without ``.main.`` or ``.kernel.`` in
    their names are inductor's questions to the compiler about this machine.
    """
    found = {}
    for library in sorted(cache.rglob("*.so")):
        source = library.with_suffix(".cpp")
        if source.exists():
            seconds = library.stat().st_mtime - source.stat().st_mtime
            found[source.name] = f"{source.stat().st_size} bytes, {seconds:.2f} s"
    return found


def measure(name: str, depth: int, width: int) -> dict[str, Any]:
    """One run, with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="compile_time_") as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "STEPGRAPH_PROGRESS": "0"}
        command = [sys.executable, __file__, "--run", name, str(depth), str(width)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=3600
        )
    if done.returncode:
        raise SystemExit(f"{name} at depth {depth}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def draw(found: dict[str, Any], width: int) -> str:
    """CPU seconds over depth at one width, a line for each contestant, as SVG."""
    rows = {
        int(key.split()[2]): row for key, row in found.items() if key.startswith(f"width {width},")
    }
    names = dict.fromkeys(name for row in rows.values() for name in row)
    deepest, most = max(rows), max(r["cpu_s"] for row in rows.values() for r in row.values())
    colours = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#7f7f7f")

    def place(depth: float, seconds: float) -> tuple[float, float]:
        return 60 + 440 * depth / deepest, 290 - 260 * seconds / most

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="680" height="340" font-size="12">']
    parts.append('<rect width="680" height="340" fill="white"/><g font-family="sans-serif">')
    for depth in rows:
        parts.append(
            f'<text x="{place(depth, 0)[0]:.0f}" y="308" text-anchor="middle">{depth}</text>'
        )
    for seconds in range(0, int(most) + 1, 20 if most < 200 else 50):
        y = place(0, seconds)[1]
        parts.append(f'<path d="M60 {y:.0f}H500" stroke="#ddd"/>')
        parts.append(f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{seconds}</text>')
    for name, colour in zip(names, colours, strict=False):
        points = [place(d, row[name]["cpu_s"]) for d, row in sorted(rows.items()) if name in row]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" fill="{colour}">{name}</text>')
    title = f"CPU seconds to the end of the first step, by layers (Llama of width {width})"
    return "\n".join([*parts, f'<text x="60" y="16">{title}</text></g></svg>']) + "\n"


def main() -> None:
    """Measures all contestants at all depths, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--depths", default="2,4,8,12,16,32")
    parser.add_argument("--widths", default="128")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path)
    arguments = parser.parse_args()
    if arguments.draw:
        picture = draw(json.loads(arguments.draw.read_text()), int(arguments.widths.split(",")[0]))
        arguments.draw.with_suffix(".svg").write_text(picture)
        return
    if arguments.run:
        name, depth, width = arguments.run
        print(json.dumps(run(name, int(depth), int(width))))
        return
    found: dict[str, Any] = {"about": __doc__.split("\n\n")[-1], "torch": torch.__version__}
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for width in arguments.widths.split(","):
        for depth in arguments.depths.split(","):
            names = arguments.contestants.split(",")
            row = {name: measure(name, int(depth), int(width)) for name in names}
            found[f"width {width}, {depth} layers"] = row
            print(width, depth, {name: round(r["cpu_s"], 1) for name, r in row.items()}, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
