"""``stepgraph check``."""

import sys

import click
import torch

from stepgraph.api import models
from stepgraph.api.plan import Plan
from stepgraph.cli.options import example, step_options
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.request import Precision
from stepgraph.runtime.ranks import parse_mesh


@click.command(
    "check", epilog=example("check --model llama-tiny --mesh dp=4 --plan zero3 --memory full")
)
@step_options(seq=64, batch_per_rank=2)
@click.option("--mesh", required=True, help="Names and sizes, as in dp=4; all in this process.")
def check_command(
    model: str,
    plan: str,
    memory: str | None,
    batch_per_rank: int,
    seq: int,
    micro_batches: int,
    max_grad_norm: float | None,
    seed: int,
    lr: float,
    mesh: str,
) -> None:
    """Runs a step before and after every pass, all ranks in this process, and compares.

    Exits with 1 and names the first pass whose result differs.
    """
    from stepgraph.equivalence.check import check_model

    shape = parse_mesh(mesh)
    loaded = Plan.load(plan) if plan.endswith(".json") else None
    check_preset(plan if loaded is None else loaded.placement, shape)
    if memory is not None:
        parse_policy(memory)
    made = models.build_model(model, seed).train()
    compute = None
    if loaded is not None:
        loaded.check_model(made)
        compute = loaded.request.step.precision.compute
    generator = torch.Generator().manual_seed(seed)
    rows = batch_per_rank * shape.data_size
    vocabulary = models.vocabulary_size(made, otherwise=256)
    ids = torch.randint(vocabulary, (rows, seq), generator=generator)
    report = check_model(
        made,
        loss=models.language_model_loss,
        optimizer=torch.optim.AdamW(made.parameters(), lr=lr),
        batch={"input_ids": ids, "labels": ids.clone()},
        mesh=mesh,
        plan=plan if loaded is None else loaded,
        memory=memory,
        precision=Precision(compute, None),
        micro_batches=micro_batches,
        max_grad_norm=max_grad_norm,
    )
    click.echo(str(report))
    if not report.ok:
        click.echo(f"stepgraph: the first pass that differs: {report.first_difference}", err=True)
        sys.exit(1)
