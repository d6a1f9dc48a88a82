"""Writes the reference pages that come from docstrings: ``docs/passes.md`` and ``docs/errors.md``.

python docs/generate.py          # a test fails where the pages are out of date
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stepgraph import errors
from stepgraph.capture import micro_batches, precision, randomness, simplify, update
from stepgraph.lowering import bind, merge, updates, waits
from stepgraph.lowering import state as lowering_state
from stepgraph.memory import apply as memory_apply
from stepgraph.placement import apply as placement_apply
from stepgraph.placement import norms, views, vocabulary

PASSES = [
    ("capture", randomness.key_random_operations),
    ("capture", simplify.drop_identities),
    ("capture", simplify.drop_empty_cat_operands),
    ("capture", simplify.index_rows_in_place),
    ("capture", precision.cast_parameters),
    ("capture", micro_batches.start_backward_at_one),
    ("capture", micro_batches.accumulate_gradients),
    ("capture", micro_batches.finish_accumulation),
    ("capture", precision.reduce_gradients_in),
    ("capture", update.clip_gradients),
    ("capture", update.update_parameters),
    ("placement", vocabulary.spell_out_log_softmax),
    ("placement", norms.spell_out_norms),
    ("placement", views.copy_views),
    ("placement", placement_apply.place_values),
    ("memory", memory_apply.recompute_in_backward),
    ("lowering", bind.bind_to_rank),
    ("lowering", merge.merge_small_collectives),
    ("lowering", updates.update_early),
    ("lowering", waits.delay_waits),
    ("lowering", lowering_state.write_state_in_place),
]


def passes_page() -> str:
    """Every pass in the order it runs, with its docstring."""
    parts = [
        "# Passes\n",
        "In the order they run. Generated from the docstrings by `docs/generate.py`.\n",
    ]
    for room, rewrite in PASSES:
        text = inspect.getdoc(rewrite) or ""
        if "see the module docstring" in text:
            text = inspect.getdoc(inspect.getmodule(rewrite)) or ""
        parts.append(f"## `{rewrite.__name__}`\n\nIn `{room}/`.\n\n{text}\n")
    return "\n".join(parts)


def errors_page() -> str:
    """Every error class with its docstring; the anchors are what messages point to."""
    parts = ["# Errors\n", "Generated from the docstrings by `docs/generate.py`.\n"]
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.StepgraphError):
            parts.append(f"## {name}\n\n{inspect.getdoc(error)}\n")
    return "\n".join(parts)


PAGES = {"passes.md": passes_page, "errors.md": errors_page}


def main() -> None:
    """Writes both pages beside this file."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())


if __name__ == "__main__":
    main()
