"""The table of graph-by-graph training beside plain torch: placement x lowering x compiled autograd x ...

    python benchmarks/equal_by_graphs.py --minutes 30 --json benchmarks/results/equal_by_graphs.json

Two gloo ranks, 20 steps, a model with two graph breaks and a hook on a parameter; a cell is equal if the
gradients of its first three steps are plain PyTorch's and nothing is compiled after warm-up. Cells that the
file has already are kept; those that were not reached are in it as not run.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.end_to_end.graph_by_graph import RANKS, TOLERANCE, all_cells, difference, plain, trained

RESULTS = Path(__file__).parent / "results" / "equal_by_graphs.json"


def run_cell(cell):
    """What came of one cell."""
    from stepgraph.frontends.launcher import launch

    start = time.perf_counter()
    try:
        found = launch(trained, cell, ranks=RANKS)[0]
    except Exception as error:
        return {"ran": True, "equal": False, "error": str(error)[:300]}
    off = difference(cell, found, plain(cell))
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
    cells = [cell for name in ("eager", "inductor") for cell in all_cells(name)]
    for cell in cells:
        if known.get(cell.name, {}).get("ran"):
            continue
        chosen = cell.lowering in arguments.lowerings.split(",")
        late = not chosen or time.monotonic() > until
        known[cell.name] = {"ran": False} if late else run_cell(cell)
        if not late:
            print(cell.name, known[cell.name], flush=True)
        arguments.json.write_text(json.dumps(known, indent=1) + "\n")
    ran = [row for row in known.values() if row["ran"]]
    print(f"{len(ran)} of {len(known)} cells ran, {sum(row['equal'] for row in ran)} are equal")


if __name__ == "__main__":
    main()
