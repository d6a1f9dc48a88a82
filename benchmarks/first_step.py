"""GPT-2 (124 million parameters) on two gloo ranks: the first step, later ones, and memory; beside FSDP2.

    python benchmarks/first_step.py --json benchmarks/results/first_step.json

Each contestant is two processes of one thread each with an empty compiler cache, imports aside; they take
turns. Empty is all of it: the C++ header that inductor precompiles once on a machine, in its folder for
temporary files, too; "header there" are the same where that is there already. ``first_step_s`` is the
slower rank's, building the engine or wrapping the model included; ``step_s`` the median of the following;
``resident_gib`` the larger rank's peak. ``fsdp2_compile`` compiles each block.
"""

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTESTANTS = ("stepgraph", "fsdp2_compile", "fsdp2")
RANKS, ROWS, TOKENS = 2, 1, 128


def serve(name: str, steps: int) -> None:
    """One rank."""
    import torch
    import torch._inductor.compile_fx
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    import stepgraph

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **still)).train()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(50257, (ROWS, TOKENS), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    dist.barrier()
    start = time.perf_counter()
    if name == "stepgraph":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = stepgraph.Engine(model, optimizer=optimizer, plan="zero3", lowering="inductor").step
    else:
        for block in model.transformer.h:
            if name == "fsdp2_compile":
                block.compile()
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(batch: dict) -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    loss = float(step(batch))
    took = [time.perf_counter() - start]
    for _ in range(steps):
        start = time.perf_counter()
        step(batch)
        took.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {"first_step_s": took[0], "step_s": statistics.median(took[1:]), "resident_gib": peak}
    print(json.dumps(row | {"loss": loss}), flush=True)
    dist.destroy_process_group()


def run(name: str, steps: int, header: bool = False) -> dict[str, float]:
    """Both ranks of a contestant; the larger of what they say. ``header``: the machine has it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as cache:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
        world |= {"LOCAL_WORLD_SIZE": str(RANKS), "TORCHINDUCTOR_CACHE_DIR": cache}
        world |= {} if header else {"TMPDIR": cache}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--serve", name, "--steps", str(steps)],
                env=os.environ | world | {"RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, text=True,
            )
            for r in range(RANKS)
        ]  # fmt: skip
        rows = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return {key: max(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.steps)
        return
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for header in (False, True):
            for name in CONTESTANTS[: 2 if header else None]:
                row = run(name, given.steps, header)
                name += ", header there" if header else ""
                rows.setdefault(name, []).append(row)
                print(name, row, flush=True)
    found: dict[str, Any] = {
        "about": __doc__.split("\n\n", 2)[2].strip(),
        "machine": platform.machine(),
    }
    for name, several in rows.items():
        found[name] = {key: statistics.median(r[key] for r in several) for key in several[0]}
    for header in ("", ", header there"):
        ours, theirs = (found[name + header] for name in CONTESTANTS[:2])
        ratios = {key[:-2]: ours[key] / theirs[key] for key in ("first_step_s", "step_s")}
        found[f"to fsdp2_compile{header}"] = ratios
        print(ratios, header)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
