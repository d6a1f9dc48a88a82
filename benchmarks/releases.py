"""What passes on a release of torch: a run of the suite, added to the table of releases.

    make test TORCH=2.15.0         # runs this at its end, on .venv-2.15.0/tests.xml
    python benchmarks/releases.py tests.xml --json benchmarks/results/releases.json

Run it with the Python of the environment that the suite ran in. ``docs/releases.md`` shows the table.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

RESULTS = Path(__file__).parent / "results" / "releases.json"
KINDS = ("failure", "error", "skipped")


def cases_of(
    reports: list[Path],
) -> dict[tuple[str, str], tuple[float, ElementTree.Element | None]]:
    """Module and name of each test -> its seconds and what pytest says where it did not pass."""
    cases = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            found = next((case.find(kind) for kind in KINDS if case.find(kind) is not None), None)
            name = str(case.get("classname")), str(case.get("name")).split("@")[0]
            cases[name] = float(case.get("time") or 0), found
    return cases


def counted(reports: list[Path]) -> dict:
    """Numbers of tests, and why those failed that did: the first line of each message, how often."""
    kinds: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    failed = []
    for (module, name), (_, found) in cases_of(reports).items():
        kinds["passed" if found is None else found.tag] += 1
        if found is not None and found.tag != "skipped":
            failed.append(f"{module}::{name}")
            text = (found.get("message") or "").strip().splitlines() or ["no message"]
            reasons[re.sub(r"0x[0-9a-f]+|[0-9]+", "#", text[0])[:120]] += 1
    return {
        "passed": kinds["passed"],
        "failed": kinds["failure"],
        "errors": kinds["error"],
        "skipped": kinds["skipped"],
        "why": dict(reasons.most_common(25)),
        "which": sorted(failed),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "reports", type=Path, nargs="+", help="what pytest --junitxml wrote; a later one counts"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of the tests that ran; by default the one checked out")
    given = parser.parse_args()
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    about = {
        "commit": given.commit or asked.stdout.strip(),
        "python": sys.version.split()[0],
        "built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "the host",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    known = json.loads(given.json.read_text()) if given.json.exists() else {}
    known[torch.__version__.split("+")[0]] = {**about, **counted(given.reports)}
    order = sorted(known, key=lambda version: [int(part) for part in version.split(".")])
    given.json.write_text(json.dumps({name: known[name] for name in order}, indent=1) + "\n")


if __name__ == "__main__":
    main()
