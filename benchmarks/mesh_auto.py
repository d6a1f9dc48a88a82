"""How long ``stepgraph plan --mesh auto`` takes, and when its meshes come: LLaMA-3 8B at 32k on 16 ranks.

    python benchmarks/mesh_auto.py --json benchmarks/results/mesh_auto.json

The command as a user types it, in a process of its own; each mesh with the second at which its line came.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ARGUMENTS = ["llama3-8b", "--mesh", "auto", "--ranks", "16", "--seq", "32768"]
_MESH = re.compile(r"\b(?:\w+=\d+)(?:,\w+=\d+)*\b")


def main() -> None:
    """Runs it and prints each line as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "stepgraph", "plan", *ARGUMENTS]
    start, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        for line in ran.stdout or ():
            seconds = round(time.perf_counter() - start, 1)
            print(seconds, line, end="", flush=True)
            if "memory" in line and _MESH.search(line):
                lines.append({"seconds": seconds, "line": line.strip()})
    found = {
        "command": " ".join(["stepgraph", "plan", *ARGUMENTS]),
        "seconds": round(time.perf_counter() - start, 1),
        "first mesh, seconds": lines[0]["seconds"],
        "meshes": lines,
        "exit code": ran.returncode,
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
