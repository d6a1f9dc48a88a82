"""``stepgraph explain``."""

import click

from stepgraph.api.plan import Plan
from stepgraph.cli.options import example
from stepgraph.planning.explanation import explain, overview
from stepgraph.report.text import plan_summary


@click.command(
    "explain", epilog=example("explain plan.json model.layers.0.self_attn.q_proj.weight")
)
@click.argument("plan", metavar="PLAN")
@click.argument("value", metavar="[VALUE]", required=False)
def explain_command(plan: str, value: str | None) -> None:
    """Says why a value of a plan file lives where it does, and what the runner-up would cost.

    VALUE is a parameter, an input or an operation, by its stable name. Without it: the plan's summary,
    and how values are named.
    """
    loaded = Plan.load(plan)
    if value is None:
        click.echo(plan_summary(loaded))
        click.echo(overview(loaded))
    else:
        click.echo(explain(loaded, value))
