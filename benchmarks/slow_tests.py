"""What passed of the tests that are too slow for `make test`: a table, from what pytest wrote.

    pytest -m slow tests/end_to_end/test_one_program.py --junitxml=slow.xml
    python benchmarks/slow_tests.py slow.xml                # into benchmarks/results/slow_tests.json

Several reports: a later one counts, for the tests that are in it. Tests of other modules stay in the table.
"""

import argparse
import json
import subprocess
from pathlib import Path

from releases import cases_of

RESULTS = Path(__file__).parent / "results" / "slow_tests.json"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what pytest --junitxml wrote")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of the tests that ran; by default the one checked out")
    given = parser.parse_args()
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    table = json.loads(given.json.read_text()) if given.json.exists() else {}
    fresh: dict[str, dict] = {}
    for (module, name), (seconds, found) in cases_of(given.reports).items():
        row = fresh.setdefault(
            f"{module}::{name.partition('[')[0]}",
            {
                "commit": given.commit or asked.stdout.strip(),
                "passed": 0,
                "seconds": 0.0,
                "failed": [],
            },
        )
        row["seconds"] = round(row["seconds"] + seconds, 1)
        if found is None:
            row["passed"] += 1
        elif found.tag != "skipped":
            row["failed"].append(name)
    table |= fresh
    given.json.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
