"""The table of graph-by-graph training beside plain torch: placement x lowering x compiled autograd x ...

    python benchmarks/equal_by_graphs.py --minutes 30 --json benchmarks/results/equal_by_graphs.json

Two gloo ranks, 20 steps, a model with two graph breaks and a hook on a parameter; a cell is equal if
the gradients of its first three steps are plain PyTorch's and nothing is compiled after warm-up. Below
ours are the cells of torch itself, DDP and FSDP2 under ``torch.compile``, on the same model with a loss
that counts all tokens (each rank's mean weighs the same there). Cells that the file has already are kept;
those that were not reached are in it as not run.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from tests.end_to_end.graph_by_graph import (
    COMPARED,
    RANKS,
    STEPS,
    TOLERANCE,
    all_cells,
    batch_of,
    difference,
    gradients_of,
    loss_of,
    make_model,
    optimizer_of,
    plain,
    trained,
)

RESULTS = Path(__file__).parent / "results" / "equal_by_graphs.json"
PEERS = {"ddp": "DDP", "zero3": "FSDP2"}
EVERY_TOKEN = -100


def peer_cells(lowering):
    """The same settings, of torch's own two."""
    cells = [cell for cell in all_cells(lowering) if cell.plan in PEERS]
    return [replace(cell, plan=PEERS[cell.plan]) for cell in cells]


def doubled(parameter):
    """What the model's own hook does, to what has been accumulated."""
    parameter.grad.mul_(2)


def trained_by_torch(cell):
    """What ``trained`` returns, of DDP or FSDP2 under torch.compile."""
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch._dynamo.config.compiled_autograd = cell.compiled_autograd
    if cell.compiled_autograd:  # as the error without it asks for
        torch._dynamo.config.optimize_ddp = "python_reducer"
    model = inner = make_model(cell)
    if cell.plan == "FSDP2":
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh)
        # Its parameters are new ones, of which it runs the hooks of this kind alone.
        model.second[0].weight.register_post_accumulate_grad_hook(doubled)
    else:
        model = DistributedDataParallel(model)
    loss, optimizer = loss_of(cell, EVERY_TOKEN), optimizer_of(cell, inner)

    def forward_and_backward(batch):
        value = loss(model, batch)
        value.backward()
        return value

    call = torch.compile(forward_and_backward, backend=cell.lowering)
    found, warm = [], 0
    for step in range(STEPS):
        value = call(batch_of(step, rank, ranks)).detach()
        dist.all_reduce(value)
        if step < COMPARED:
            found.append((value.item() / ranks, gradients_of(inner)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            warm = counters["stats"]["unique_graphs"]
    graphs = counters["stats"]["unique_graphs"]
    return {"steps": found, "graphs": graphs, "after warm-up": graphs - warm}


def run_cell(cell):
    """What came of one cell."""
    from stepgraph.cli.launcher import launch

    start = time.perf_counter()
    of_torch = cell.plan in PEERS.values()
    try:
        found = launch(trained_by_torch if of_torch else trained, cell, ranks=RANKS)[0]
    except Exception as error:
        return {"ran": True, "equal": False, "error": str(error).split("where:")[0].strip()[:300]}
    off = difference(cell, found, plain(cell, EVERY_TOKEN) if of_torch else plain(cell))
    return {
        "ran": True,
        "equal": off < TOLERANCE[cell.precision] and not found["after warm-up"],
        "difference": off,
        "tolerance": TOLERANCE[cell.precision],
        "graphs": found["graphs"],
        "compiled after warm-up": found["after warm-up"],
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--lowerings", default="eager,inductor")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    known = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
    until = time.monotonic() + 60 * arguments.minutes
    multiprocessing.set_start_method("forkserver")  # cells begin where imports are done
    multiprocessing.set_forkserver_preload(["stepgraph", "torch._inductor.compile_fx"])
    of_both = (all_cells, peer_cells)
    cells = [c for of_one in of_both for name in ("eager", "inductor") for c in of_one(name)]
    for cell in cells:
        if known.get(cell.name, {}).get("ran"):
            continue
        chosen = cell.lowering in arguments.lowerings.split(",")
        late = not chosen or time.monotonic() > until
        known[cell.name] = {"ran": False} if late else run_cell(cell)
        if not late:
            print(cell.name, known[cell.name], flush=True)
        arguments.json.write_text(json.dumps(known, indent=1) + "\n")
    for title, of_one in (("stepgraph", all_cells), ("torch", peer_cells)):
        rows = [known[c.name] for name in ("eager", "inductor") for c in of_one(name)]
        ran = [row for row in rows if row["ran"]]
        print(f"{title}: {sum(r['equal'] for r in ran)} of {len(ran)} equal, of {len(rows)}")


if __name__ == "__main__":
    main()
