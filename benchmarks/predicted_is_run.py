"""Collectives and live memory of a step, predicted and counted on real ranks: five models, every preset.

    python benchmarks/predicted_is_run.py --json benchmarks/results/predicted_is_run.json

What `tests/end_to_end/test_predicted_is_run.py` runs; 2 and 4 gloo ranks, eager lowering, tiny models.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.end_to_end.test_predicted_is_run import ALL, run

from stepgraph.cli.launcher import launch


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    for ranks, cases in ALL.items():
        per_rank = launch(run, ranks, cases, ranks=ranks)
        for case in cases:
            rows = [of_rank[case] for of_rank in per_rank]
            predicted, measured = rows[0]["peak"]
            found[f"{ranks} ranks, {' '.join(case)}"] = {
                "collectives": rows[0]["predicted"],
                "as counted on every rank": all(r["ran"] == r["predicted"] for r in rows),
                "the plan's program is the rank's": all(r["same program"] for r in rows),
                "peak bytes": {"predicted": predicted, "measured": measured},
                "peak ratio": round(predicted / measured, 4),
            }
    for name, row in found.items():
        print(name, row["as counted on every rank"], row["peak ratio"])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
