"""What ``stepgraph train`` runs: on every rank the same loop, watched and recorded by the first."""

import logging
import os
import signal
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.api.engine import Engine
from stepgraph.api.models import build_model, find_model, language_model_loss
from stepgraph.api.plan import Plan
from stepgraph.cli.launcher import PASS_ON, launch, peak_bytes, rank_device
from stepgraph.cli.progress import StepMetrics, Watch
from stepgraph.cli.saving import SaveFolder, Saves, StopSignals
from stepgraph.cli.text import BatchShape, TextBatches, count_bytes, generate, read_text
from stepgraph.errors import BatchError, MeshError, UsageError
from stepgraph.lowering.presets import check_lowering
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.program.layout import MeshShape, data_mesh
from stepgraph.runtime.ranks import parse_mesh

PROMPT_BYTES = 48


@dataclass(frozen=True)
class TrainOptions:
    """The options of ``stepgraph train``, under their own names."""

    model: str
    text: str
    ranks: int | None = None
    plan: str = "zero3"
    steps: int = 200
    mesh: str | None = None
    memory: str | None = None
    lowering: str | None = None
    seed: int = 0
    metrics: str | None = None
    batch_per_rank: int = 8
    seq: int = 128
    lr: float = 1e-3
    micro_batches: int = 1
    max_grad_norm: float | None = None
    sample: int = 0
    strict: bool = False
    checkpoint: str | None = None
    save_every: int = 50
    resume: bool = False


@dataclass(frozen=True)
class Summary:
    """What a run came to. Rates are of the whole run's tokens, memory is the first rank's.

    ``first_step``: of this process, after those taken before a save; ``losses`` begin there, and are
    empty where none was left. ``stopped_by``: the signal that ended the run before its last step.
    ``saved_to``: the last save.
    """

    model: str
    parameters: int
    plan: str
    mesh: str
    ranks: int
    device: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float
    peak_bytes: int
    compile_seconds: float
    seconds: float
    losses: list[float]
    prompt: str | None
    sample: str | None
    first_step: int = 1
    stopped_by: str | None = None
    saved_to: str | None = None


def train(options: TrainOptions) -> Summary | None:
    """Checks the options, then trains on the ranks they ask for.

    Returns:
        the summary; None on ranks other than the first, where this process is one already.

    Raises:
        UsageError: options that cannot work, before anything is started.
        LaunchError: a rank failed.
        SystemExit: with ``checkpoint``, SIGINT or SIGTERM came before a rank was ready for it, or twice.
    """
    mesh = check_options(options)
    if options.checkpoint is None:
        return launch(_train_on_rank, options, mesh, ranks=mesh.world_size)[0]
    try:
        return launch(_train_on_rank, options, mesh, ranks=mesh.world_size, signals=PASS_ON)[0]
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        text = "stopped at once; what was complete in {} is as it was"
        Console(stderr=True).print(text.format(options.checkpoint), soft_wrap=True)
        raise SystemExit(code) from None


def check_options(options: TrainOptions) -> MeshShape:
    """Raises UsageError for options that cannot work together; returns the mesh they ask for."""
    plan = Plan.load(options.plan) if options.plan.endswith(".json") else None
    mesh = _mesh_of(options, plan)
    check_preset(options.plan if plan is None else plan.placement, mesh)
    if plan is not None and plan.mesh != mesh:
        raise MeshError(
            f"the plan is for mesh {plan.mesh}, not {mesh}", do="leave --mesh and --ranks out"
        )
    if options.memory is not None:
        parse_policy(options.memory)
    if options.lowering is not None:
        check_lowering(options.lowering)
    if options.batch_per_rank % options.micro_batches:
        raise BatchError(
            f"--batch-per-rank {options.batch_per_rank} does not divide into "
            f"--micro-batches {options.micro_batches}"
        )
    if options.metrics is not None and not Path(options.metrics).absolute().parent.is_dir():
        raise UsageError(f"there is no folder for --metrics {options.metrics!r}", do="create it")
    if options.resume and options.checkpoint is None:
        raise UsageError("--resume needs to know where the saves are", do="add --checkpoint DIR")
    if options.checkpoint is not None:
        _save_folder(options).check(options.resume)
    find_model(options.model)
    _batch_shape(options, mesh).check_fits(count_bytes(options.text), options.text)
    return mesh


def _mesh_of(options: TrainOptions, plan: Plan | None) -> MeshShape:
    """The mesh asked for: --mesh, the plan file's own, or every rank on ``dp``."""
    ranks = options.ranks
    if "WORLD_SIZE" in os.environ:
        launched = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, launched):
            raise UsageError(
                f"--ranks {ranks} was asked for, but {launched} ranks were launched already",
                do="leave --ranks out under torchrun",
            )
        ranks = launched
    mesh = parse_mesh(options.mesh) if options.mesh is not None else None
    if mesh is None:
        mesh = plan.mesh if plan is not None else data_mesh(ranks or 1)
    if ranks not in (None, mesh.world_size):
        raise MeshError(
            f"mesh {mesh} has {mesh.world_size} ranks, but --ranks is {ranks}",
            do=f"use --ranks {mesh.world_size}, or leave it out",
        )
    return mesh


def _save_folder(options: TrainOptions) -> SaveFolder:
    assert options.checkpoint is not None
    return SaveFolder(Path(options.checkpoint).absolute(), options.save_every)


def _batch_shape(options: TrainOptions, mesh: MeshShape) -> BatchShape:
    return BatchShape(options.batch_per_rank, options.seq, mesh.data_size)


def _train_on_rank(options: TrainOptions, mesh: MeshShape) -> Summary | None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:
        # What is said once is said by rank 0.
        logging.getLogger("stepgraph").setLevel(logging.ERROR)
    device = rank_device()
    shape = _batch_shape(options, mesh)
    batches = TextBatches(read_text(options.text), shape, options.seed, mesh.data_rank(rank))
    model = build_model(options.model, options.seed).to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(
        model,
        loss=language_model_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr),
        mesh=str(mesh) if dist.is_initialized() else None,
        plan=options.plan,
        memory=options.memory,
        lowering=options.lowering,
        max_grad_norm=options.max_grad_norm,
        micro_batches=options.micro_batches,
        strict=options.strict,
        seed=options.seed,
    )
    history: list[StepMetrics] = []
    saves = resumed = saved_to = None
    stopped = 0
    with StopSignals(device) if options.checkpoint else nullcontext() as stop:
        if options.checkpoint is not None:
            folder = _save_folder(options)
            resumed = folder.resume(engine, {"data": batches}) if options.resume else None
            batches = replace(batches, seed=engine.seed)  # the run that was saved goes on
            saves = Saves(folder, engine, {"data": batches})
        begun = engine.stats.steps
        resumed_at = begun if options.resume else None
        with Watch(options.steps, options.metrics, show=rank == 0, resumed_at=resumed_at) as watch:
            if resumed is not None:
                watch.say(f"resumed from {resumed}")
            for step in range(begun + 1, options.steps + 1):
                if stop is not None and (stopped := stop.agreed()):
                    break
                start = time.perf_counter()
                loss = float(engine.step(batches.batch(step)))
                seconds = time.perf_counter() - start
                done = StepMetrics(step, loss, shape.bytes / seconds, peak_bytes(device), seconds)
                history.append(done)
                watch.step(done)
                if saves is not None:
                    saves.after_step()
            if saves is not None:
                saved_to = saves.finish()
            if stopped:
                left = f", saved to {saved_to}; --resume goes on from there"
                left = ": there is nothing to save yet" if saved_to is None else left
                name = signal.Signals(stopped).name
                watch.say(f"stopped by {name} after step {engine.stats.steps}{left}")
    # As much of the text as shows where a line begins and what it is about.
    prompt = sample = None
    if options.sample and not stopped:
        prompt = bytes(batches.batch(0)["input_ids"][0, :PROMPT_BYTES].tolist())
        sample = _sample(engine, options, prompt, device)
    if rank:
        return None
    settled = history[1:] or history  # the first step compiles
    return Summary(
        model=options.model,
        parameters=count,
        plan=engine.plan.placement,
        mesh=str(mesh),
        ranks=mesh.world_size,
        device=device.type,
        steps=engine.stats.steps,
        first_loss=history[0].loss if history else None,
        last_loss=history[-1].loss if history else None,
        tokens_per_second=statistics.median([d.tokens_per_second for d in settled] or [0.0]),
        peak_bytes=peak_bytes(device),
        compile_seconds=engine.stats.compile_seconds,
        seconds=sum(done.seconds for done in history),
        losses=[done.loss for done in history if done.loss is not None],
        prompt=None if prompt is None else prompt.decode(errors="replace"),
        sample=sample,
        first_step=begun + 1,
        stopped_by=signal.Signals(stopped).name if stopped else None,
        saved_to=None if saved_to is None else str(saved_to),
    )


def _sample(
    engine: Engine, options: TrainOptions, prompt: bytes, device: torch.device
) -> str | None:
    """Text from the trained weights, by a plain copy of the model on the first rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = {}
    for name, value in engine.state_dict().items():  # every rank takes part in each gathering
        full = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name] = full if rank == 0 else None
    if rank:
        return None
    plain: nn.Module = build_model(options.model, options.seed).to(device)
    plain.load_state_dict(whole)
    return generate(plain, options.sample, prompt=prompt, window=options.seq, seed=options.seed)
