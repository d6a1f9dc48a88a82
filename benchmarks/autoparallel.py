"""LLaMA-3 8B on dp=16,tp=8: ``auto`` beside the placements that AutoParallel chose, under one cost model.

    python benchmarks/autoparallel.py --peer PEER.json [--json benchmarks/results/autoparallel.json]

``PEER.json`` holds AutoParallel's answer: parameters, and the placements of the operations of some layers.
Parameters and the results of modules are matched by what they are in the model (its model is another
implementation); everything matched is pinned through constraints, the rest of that plan is the solver's.
What could not be matched is listed. Memory ``full``, bf16 compute, AdamW, two sequences of 8,192 tokens on
each data-parallel rank, an H100 model; ``auto`` alone also with a budget of 5.7 GiB for the whole step.
Behind these: what is best kept, and named policies, within 5.3 GiB, within what ``full`` took with whole
logits, and within what that last plan takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from plan import planner_of

from stepgraph.api.planner import Planner
from stepgraph.errors import StepgraphError
from stepgraph.runtime.ranks import parse_mesh

MESH, BUDGET = "dp=16,tp=8", int(5.7 * 2**30)
WHOLE_STEP, WHOLE_LOGITS = int(5.3 * 2**30), int(4.34 * 2**30)
NAMED = ("full", "ops", "layers:2", "none")
PARAMETERS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.1.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.1.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.1.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.1.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.1.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.1.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.1.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.1.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.1.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Module of the peer, operation -> our value of that shape.
VALUES = {
    ("tok_embeddings", "aten.embedding.default"): "model.embed_tokens/embedding",
    ("layers.1.attention_norm", "prims.convert_element_type.default"): (
        "model.layers.*.input_layernorm/output"
    ),
    ("layers.1.attention.wq", "aten.einsum.default"): "model.layers.*.self_attn.q_proj/output",
    ("layers.1.attention.wk", "aten.einsum.default"): "model.layers.*.self_attn.k_proj/output",
    ("layers.1.attention.wv", "aten.einsum.default"): "model.layers.*.self_attn.v_proj/output",
    ("layers.1.attention.sdpa", "<built-in function getitem>"): "model.layers.*.self_attn/getitem",
    ("layers.1.attention.wo", "aten.einsum.default"): "model.layers.*.self_attn.o_proj/output",
    ("layers.1.ffn_norm", "prims.convert_element_type.default"): (
        "model.layers.*.post_attention_layernorm/output"
    ),
    ("layers.1.feed_forward.w1", "aten.einsum.default"): "model.layers.*.mlp.gate_proj/output",
    ("layers.1.feed_forward.w3", "aten.einsum.default"): "model.layers.*.mlp.up_proj/output",
    ("norm", "prims.convert_element_type.default"): "model.norm/output",
    ("output", "aten.einsum.default"): "lm_head/output",
}


def stored(parameter: dict[str, Any]) -> str:
    """Where a parameter lives.

    Cut over tp first and then over dp (``_S``), it is gathered over dp alone: here that is a cut of the
    other dimension, of the same bytes.
    """
    first = parameter.get("applied", [""])[0]
    return "S(1)S(0)" if first.startswith("_S(0") else "".join(parameter["placement"])


def pinned(peer: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Constraints by our names, and what of the peer's answer has no counterpart here."""
    asked = {ours: stored(peer["parameters"][theirs]) for theirs, ours in PARAMETERS.items()}
    missing = [
        "the scheduling of its collectives, and what its selective checkpointing keeps",
        "placements inside a norm and of the rotary embedding (complex numbers there, pairs here)",
        "the loss (it has none)",
    ]
    for value in peer["values"]:
        module = str(value.get("module") or value.get("module_inferred"))
        name = VALUES.get((module, value["op"]))
        if name and value["phase"] == "forward" and "P" not in value["out"]:
            asked[name] = "".join(value["out"])  # the last one of a module is its result
    return asked, missing


def report(
    planner: Planner, memory: str, budget: int | None, constraints: dict[str, str] | None = None
) -> dict:
    """One plan under our cost model."""
    attempt = planner.plan(parse_mesh(MESH), "auto", memory, budget, constraints or {})
    predicted = attempt.plan.predicted
    assert predicted is not None
    notes = [note for note in attempt.plan.notes if note.startswith(("auto: ", "memory "))]
    return {"memory": memory, **predicted.to_json(), "fits": attempt.fits, "notes": notes}


def main() -> None:
    """Plans several times and prints the answers side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peer = json.loads(arguments.peer.read_text())
    asked, missing = pinned(peer)
    planner = planner_of("llama3-8b", 0, MESH)
    results: dict[str, Any] = {"mesh": MESH, "torch": torch.__version__, "pinned": asked}

    def add(name: str, *how: Any) -> None:
        try:
            results[name] = report(planner, *how)
        except StepgraphError as error:
            results[name] = {"error": str(error)}
        print(name, json.dumps(results[name])[:600], file=sys.stderr, flush=True)

    add("auto", "full", None)
    add("auto in 5.7 GiB", "full", BUDGET)
    add("AutoParallel's", "full", None, asked)
    within = results["auto in 5.7 GiB"].get("peak_bytes", BUDGET)
    for budget in (WHOLE_STEP, WHOLE_LOGITS, within):
        for memory in (*NAMED, "auto"):
            add(f"{memory} in {budget / 2**30:.2f} GiB", memory, budget)
    results["not matched"] = missing
    results["its own collectives"] = peer["collectives"]["after_apply_sharding"]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
