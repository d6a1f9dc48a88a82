"""What of a Program has a row for each of the batch, before placement has cut it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, Value


def is_batched(role: roles.Input, value: Value, rows: int | None) -> bool:
    """Whether an input is rows of the batch; ``rows``: as for :func:`find_normalisation`."""
    if not isinstance(role, roles.UserInput) or not value.shape:
        return False
    return rows is None or value.shape[0] % rows == 0


def drawn_for_rows(program: Program, drawn: fx.Node, rows: int | None = None) -> Shard | None:
    """How slices have random numbers of which there are as many as rows, each drawing its own."""
    inputs = zip(program.inputs, program.input_values, strict=True)
    batch = {rows, *(value.shape[0] for role, value in inputs if is_batched(role, value, rows))}
    cuts = [dim for dim, size in enumerate(meta(drawn)["val"].shape) if size in batch]
    return Shard(cuts[0]) if cuts else None


def of_one_shape(drawn: fx.Node, before: Collection[fx.Node] = ()) -> Iterator[fx.Node]:
    """Random numbers, and what the forward makes of them in their shape: masks of them, most often.

    Args:
        before: where not to go on.
    """
    seen, values = {drawn}, [drawn]
    for value in values:  # grows
        yield value
        for user in value.users:
            made = meta(user)["val"] if meta(user).get("phase") == FORWARD else None
            same = isinstance(made, torch.Tensor) and made.shape == meta(drawn)["val"].shape
            if same and user not in seen and user not in before:
                seen.add(user)
                values.append(user)
