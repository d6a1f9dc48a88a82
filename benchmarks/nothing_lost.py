"""What a fixed set of training steps computes, recorded to the bit, and two recordings compared.

    python benchmarks/nothing_lost.py record before
    PYTHONPATH=../changed/src python benchmarks/nothing_lost.py record after
    python benchmarks/nothing_lost.py compare before after

For a change that must change nothing. A case is a model, a placement and a setting: three steps of
the stepgraph that is imported, on gloo ranks of one thread each. It leaves `CASE.json` (losses as
exact hex floats, a checksum of the final parameters and buffers) and `CASE.txt` (every program that
ranks 0 and 1 lowered, in order); what raises is recorded as the class of its error. Two recordings
of the same code are identical.
"""

import argparse
import copy
import dataclasses
import gc
import hashlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import stepgraph

ROWS, TOKENS, WORDS, STEPS = 12, 8, 64, 3  # 12 rows divide over 4 ranks, and over 2 by 3
ROUNDING = 1e-5  # relative, of losses that may differ

# -- models, a few thousand parameters each

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
LLAMA = SIZES | {"num_key_value_heads": 2, "vocab_size": WORDS, "num_hidden_layers": 2}
MIXTRAL = LLAMA | {"num_hidden_layers": 1, "num_local_experts": 4}
MIXTRAL |= {"experts_implementation": "batched_mm"}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}  # dropout is 0.1, that of attention included
VIT = SIZES | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "num_labels": 5}
VIT |= {"hidden_dropout_prob": 0.1}


class _Broken(nn.Module):
    """A graph break between two layers, dropout in both, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.first = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 16))
        self.second = copy.deepcopy(self.first)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.first(hidden)
        torch._dynamo.graph_break()
        hidden = hidden + self.second(hidden)
        return F.linear(self.norm(hidden), self.embed.weight)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def text() -> dict[str, Tensor]:
    """Tokens whose ignored labels and padding differ from row to row, so from rank to rank."""
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(ROWS):
        labels[row, : row * 5 % TOKENS] = -100
        mask[row, TOKENS - row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.randint(0, 5, (ROWS,))}


def entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(next(iter(batch.values())))
    return F.cross_entropy(scores.flatten(0, -2), batch["labels"].flatten())


# name -> model, a batch of all ranks, loss (None: the model's own)
MODELS: dict[str, tuple[Callable, Callable, Callable | None]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), text, None),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), text, None),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)), images, None),
    "convolutional": (convolutional, images, entropy),
    "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL)), text, None),
    "broken": (_Broken, text, entropy),
}

# -- cases

MESHES = {
    **dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "auto"), (("dp", 2),)),
    "hsdp": (("replicate", 2), ("shard", 2)),
    **dict.fromkeys(("tp+zero3", "tp+sp+zero3"), (("dp", 2), ("tp", 2))),
}
SETTINGS: dict[str, dict[str, Any]] = {  # what Engine is told; `run` reads the names of the others
    **dict.fromkeys(("plain", "evaluate", "sgd", "split", "autograd", "autograd-split"), {}),
    "micro": {"micro_batches": 3},
    "clip": {"max_grad_norm": 0.1},
    "bf16": {"compute_dtype": torch.bfloat16},
    "full": {"memory": "full"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting of everything."""

    model: str
    placement: str
    setting: str = "plain"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.model}-{self.placement}-{self.setting}"

    @property
    def ranks(self) -> int:
        """How many it runs on."""
        return 2 ** len(MESHES[self.placement])


CASES = [Case(model, placement) for model in MODELS for placement in MESHES]
CASES += [Case(model, "zero3", "evaluate") for model in MODELS]
CASES += [Case(model, "tp+sp+zero3", "evaluate") for model in ("llama", "gpt2")]
CASES += [
    Case(model, placement, setting)
    for model, placement in (("llama", "zero3"), ("gpt2", "zero1"))
    for setting in ("sgd", "micro", "clip", "bf16", "full", "split")
]
CASES += [
    Case("broken", placement, setting)
    for placement in ("ddp", "zero3")
    for setting in ("micro", "clip", "split", "autograd", "autograd-split")
]

# -- recording


def record_lowered(texts: list[str]) -> None:
    """From here on every program is printed into `texts` before it is lowered.

    With `text_of` all that this script knows of stepgraph's inside, to be adjusted when that changes.
    """
    try:
        from stepgraph.lowering.presets import LOWERINGS
    except ModuleNotFoundError:  # where they were when they were functions
        from stepgraph.lowering.lower import LOWERINGS

    def recording(make: Callable) -> Callable:
        def made(program: Any, *rest: Any, **named: Any) -> Any:
            texts.append(text_of(program))
            return make(program, *rest, **named)

        return made

    for name, lowering in LOWERINGS.items():
        if dataclasses.is_dataclass(lowering):
            LOWERINGS[name] = dataclasses.replace(lowering, make=recording(lowering.make))
        else:
            LOWERINGS[name] = recording(lowering)


def text_of(program: Any) -> str:
    """A program as it prints; one whose inputs have no roles (a graph of many) node by node."""
    if program.inputs:
        return str(program)
    lines = [str(node.format_node()) for node in program.graph.nodes]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join([f"graph {program.name}", *lines, ""]))


def run(case: Case, mesh: DeviceMesh, lowering: str) -> dict[str, Any]:
    """Three steps of one rank: what `CASE.json` says."""
    make, make_batch, loss = MODELS[case.model]
    torch.manual_seed(0)
    batches = [make_batch() for _ in range(STEPS + 1)]
    model = make().train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if case.setting == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan: Any = case.placement
    if plan == "auto":  # for a device of the table: how fast this machine is has no say
        given = {"mesh": MESHES["auto"], "loss": loss, "optimizer": optimizer, "device": "h100"}
        plan = stepgraph.plan(model, example=batches[0], memory="none", compute_dtype=None, **given)
    given = SETTINGS[case.setting] | {"loss": loss, "optimizer": optimizer, "lowering": lowering}
    engine = stepgraph.Engine(model, mesh=mesh, plan=plan, **given)
    if "autograd" in case.setting:
        engine.compile(backend=lowering, compiled_autograd=True)
    copies = dict(MESHES[case.placement]).get("tp", 1)  # ranks with the same rows, side by side
    parts, part = case.ranks // copies, dist.get_rank() // copies
    own = [{key: x.chunk(parts)[part] for key, x in batch.items()} for batch in batches]
    found: dict[str, Any] = {"losses": []}
    for batch in own[:STEPS]:
        if "split" in case.setting:
            value = engine(batch)
            engine.backward(value)
            engine.optimizer_step()
        else:
            value = engine.step(batch)
        found["losses"].append(value.item().hex())
    if case.setting == "evaluate":
        found["losses"].append(engine.evaluate(own[STEPS]).item().hex())
    checksum = hashlib.sha256()
    for name, value in sorted(engine.state_dict().items()):
        whole = getattr(value, "full_tensor", lambda value=value: value)().detach()
        checksum.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        checksum.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found | {"parameters": checksum.hexdigest()}


def run_rank(rank: int, cases: list[Case], lowering: str, folder: Path, scratch: str) -> None:
    """A spawned process: the cases in order. It ends early where one fails on some ranks alone."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    ranks, texts = cases[0].ranks, []
    store = dist.FileStore(f"{scratch}/store", ranks)
    patience = timedelta(minutes=2)
    dist.init_process_group("gloo", None, patience, ranks, rank, store)
    # All meshes, whatever the cases: programs name process groups by the order they were made in.
    meshes = {}
    for dims in dict.fromkeys(MESHES[case.placement] for case in CASES if case.ranks == ranks):
        names, sizes = zip(*dims, strict=True)
        meshes[dims] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    record_lowered(texts)
    for case in cases:
        start, message = time.perf_counter(), "ok"
        texts.clear()
        torch._dynamo.reset()
        try:
            found = run(case, meshes[MESHES[case.placement]], lowering)
        except Exception as error:
            found = {"error": type(error).__name__}
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
        gc.collect()
        keys = [f"{case.name} {other}" for other in range(ranks)]
        store.set(keys[rank], json.dumps([found, texts if rank < 2 else []]))
        store.wait(keys, 2 * patience)  # the others may be waiting for a collective
        everyone = [json.loads(store.get(key)) for key in keys]
        failed = [found for found, _ in everyone if "error" in found]
        if rank == 0:
            sections = [
                f"# rank {other}, program {number}\n{text}"
                for other, (_, lowered) in enumerate(everyone)
                for number, text in enumerate(lowered)
            ]
            Path(folder, f"{case.name}.txt").write_text("\n".join(sections))
            found = json.dumps(failed[0] if failed else found, indent=1)
            Path(folder, f"{case.name}.json").write_text(found + "\n")
            print(f"{case.name:<32} {time.perf_counter() - start:5.1f} s  {message}", flush=True)
        if 0 < len(failed) < ranks:
            os._exit(0)  # a collective may be open: other processes go on with what is left
    dist.destroy_process_group()


def record(cases: list[Case], folder: Path, lowering: str) -> None:
    """One launch for all cases on so many ranks, and another one for what a launch leaves."""
    start = time.perf_counter()
    print(f"{len(cases)} cases of {Path(stepgraph.__file__).parent}")
    record_lowered([])  # where that fails, no rank needs to start
    folder.mkdir(parents=True, exist_ok=True)
    files = {case: folder / f"{case.name}.json" for case in cases}
    for file in files.values():
        file.unlink(missing_ok=True)
    for ranks in (2, 4):
        while left := [c for c in cases if c.ranks == ranks and not files[c].exists()]:
            with tempfile.TemporaryDirectory(prefix="nothing_lost_") as scratch:
                try:
                    settings = (left, lowering, folder, scratch)
                    torch.multiprocessing.spawn(run_rank, settings, nprocs=ranks)
                except Exception as error:
                    print(f"the ranks died: {error}", flush=True)
            if not files[left[0]].exists():
                files[left[0]].write_text('{"error": "RanksDied"}\n')
    print(f"took {time.perf_counter() - start:.0f} s")


# -- comparing


def compare(
    cases: list[Case], before: Path, after: Path, may_differ: list[str], json_file: Path | None
) -> int:
    """Prints the table; 1 if something was lost."""
    lost = 0
    rows: dict[str, str] = {}
    print(f"{'case':<32} {'losses':<10} {'parameters':<10} programs")
    for case in cases:
        was, now = (recorded(folder / f"{case.name}.json") for folder in (before, after))
        if "error" in was or "error" in now:
            same = "error" in was and ("error" not in now or was == now)
            row = " -> ".join(found.get("error", "runs") for found in (was, now))
        else:
            allowed = any(part in case.name for part in may_differ)
            off = difference(was["losses"], now["losses"])
            equal = was["parameters"] == now["parameters"]
            same = off <= ROUNDING if allowed else off == 0 and equal
            shown = f"{off:.1e}" if off else "equal"
            row = f"{shown:<10} {'equal' if equal else 'other':<10} "
            row += lines_that_differ(*(folder / f"{case.name}.txt" for folder in (before, after)))
        lost += not same
        rows[case.name] = " | ".join(row.split(maxsplit=2)) + ("" if same else " | LOST")
        print(f"{case.name:<32} {row}{'' if same else '   LOST'}")
    print(f"{len(cases)} cases, {lost} lost")
    if json_file is not None:
        about = "case: losses of three steps | parameters | text of every lowered program"
        found = {"about": about, "lost": lost, "cases": rows}
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    return int(lost > 0)


def recorded(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"error": "not recorded"}


def difference(was: list[str], now: list[str]) -> float:
    """The largest relative one of a loss; 0 only if all bits are equal."""
    pairs = [tuple(map(float.fromhex, p)) for p in zip(was, now, strict=True) if p[0] != p[1]]
    apart = [abs(b - a) / abs(a) if a else math.inf for a, b in pairs]
    return max((x if x > 0 else math.inf for x in apart), default=0.0)  # inf, too, for what is nan


def lines_that_differ(before: Path, after: Path) -> str:
    """How many lines only one of two texts has."""
    was, now = (Counter(path.read_text().splitlines()) for path in (before, after))
    number = ((was - now) + (now - was)).total()
    if number == 0:
        return "same" if before.read_text() == after.read_text() else "in another order"
    return f"{number} lines differ"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the cases")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--lowering", default="eager")
    comparing = commands.add_parser("compare", help="exit code 1 if losses or parameters differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    within = f"cases (a part of their names) whose losses may differ by {ROUNDING:.0e}"
    comparing.add_argument("--may-differ", action="append", default=[], metavar="NAME", help=within)
    comparing.add_argument("--json", type=Path, help="where to write what was found")
    only = "cases (a part of their names); all by default"
    for command in (recording, comparing):
        command.add_argument("--only", default="", metavar="NAME", help=only)
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in case.name]
    if given.command == "compare":
        return compare(cases, given.before, given.after, given.may_differ, given.json)
    record(cases, given.folder, given.lowering)
    return 0


if __name__ == "__main__":
    sys.exit(main())
