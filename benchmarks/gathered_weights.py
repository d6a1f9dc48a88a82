"""What LLaMA-3 8B would keep of gathered weights for its backward, if views and casts of them were kept.

    PYTHONPATH=. python benchmarks/gathered_weights.py --json benchmarks/results/gathered_weights.json

Planned without ranks: zero3 and zero3 with tensor parallelism, float32 and bfloat16, all else kept
(``memory="none"``). Bytes of a rank that wait for the backward and come of gathered parameters alone: of
the program that runs, where it has to be none, and of the same plan if only the gathers themselves were
computed again (the peer's seed kept 2.62 GiB of transposed ones under tensor parallelism).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tests.gathered import gathered_and_saved, without_the_chain

import stepgraph
from stepgraph.api.models import find_model

CASES = [
    (mesh, placement, dtype)
    for mesh, placement in (("dp=128", "zero3"), ("dp=16,tp=8", "tp+zero3"))
    for dtype in (None, torch.bfloat16)
]


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with torch.device("meta"):
        model = find_model(given.model)()
    found = {}
    for mesh, placement, dtype in CASES:
        ids = torch.empty(128, 2048, dtype=torch.int64, device="meta")
        example = {"input_ids": ids, "labels": ids}
        how = {"mesh": mesh, "placement": placement, "memory": "none", "compute_dtype": dtype}
        plan = stepgraph.plan(model, example=example, schedule="none", **how)
        row = {}
        for name, one in (("as it is", plan), ("gathers alone", without_the_chain(plan))):
            saved = gathered_and_saved(one.programs(model, example=example)["step"])
            row[name] = {"values": len(saved), "gib": sum(saved.values()) / 2**30}
        assert row["as it is"]["values"] == 0, row
        found[f"{given.model}, {mesh}, {placement}, {dtype or 'float32'}"] = row
        print(mesh, placement, dtype, json.dumps(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
