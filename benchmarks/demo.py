"""What `make demo` takes outside its steps: two sources, with an empty cache and with a filled one.

    python benchmarks/demo.py ../before/src src --json benchmarks/results/demo.json

The demo's command with fewer steps, as a process; seconds of the wall clock, less those of its steps but
the first. Each source has a cache of its own: ``cold`` fills it, ``warm`` finds it. They take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = (
    "train --model llama-tiny --ranks 2 --plan zero3 --lowering inductor --batch-per-rank 2 --seq 128 "
    "--max-grad-norm 1 --steps 20"
)


def outside_steps(source: Path, cache: str) -> float:
    """Seconds of one run that are none of its steps', the first one's compilation included."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run.jsonl")
        text = ["--text", str(Path(os.__file__).parent), "--metrics", str(metrics)]
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()), "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "stepgraph", *COMMAND.split(), *text],
            env=environment, check=True, capture_output=True,
        )  # fmt: skip
        took = time.perf_counter() - start
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return took - sum(row["seconds"] for row in rows[1:])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs=2, type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    took: dict[str, dict[str, list[float]]] = {
        name: {"cold": [], "warm": []} for name in ("first", "second")
    }
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            for kind in ("cold", "warm"):
                for name, source, cache in zip(took, given.sources, (one, other), strict=True):
                    took[name][kind].append(outside_steps(source, cache))
                    print(name, kind, round(took[name][kind][-1], 1), flush=True)
    found: dict[str, Any] = {"about": "seconds outside the steps; to cold: second / first's cold"}
    medians = {n: {k: statistics.median(v) for k, v in row.items()} for n, row in took.items()}
    cold = medians["first"]["cold"]
    found |= medians | {"to cold": {kind: s / cold for kind, s in medians["second"].items()}}
    print(found["to cold"])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
