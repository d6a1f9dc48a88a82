"""Kinds of batch: the same on every rank at every call, and no more than programs are kept for."""

from __future__ import annotations

import os

import pytest
import torch

from stepgraph.cli.launcher import launch
from stepgraph.errors import BatchError, ShapeLimitError
from stepgraph.runtime.batches import KindsOfBatch, flatten_batch
from stepgraph.runtime.ranks import join_ranks

CPU = torch.device("cpu")


def rows(number, constant=None):
    return flatten_batch({"x": torch.zeros(number, 3), "how": constant}, CPU)


def test_a_kind_too_many_names_those_before_it():
    kinds = KindsOfBatch(join_ranks(None, CPU), 2)
    for entry in ("step", "evaluate"):  # each has its own
        kinds.meet(entry, rows(2))
        kinds.meet(entry, rows(4, "twice"))
        kinds.meet(entry, rows(2))
    with pytest.raises(ShapeLimitError) as caught:
        kinds.meet("step", rows(6))
    assert "x [2, 3]" in str(caught.value) and "x [4, 3], how='twice'" in str(caught.value)
    kinds.meet("step", rows(4, "twice"))


def _meet():
    rank = int(os.environ["RANK"])
    kinds = KindsOfBatch(join_ranks(None, CPU), 3)
    kinds.meet("step", rows(2))
    if rank == 1:
        kinds.meet("step", rows(2))  # one kind is known: nobody is asked
    kinds.meet("step", rows(4))
    kinds.meet("step", rows(2))
    said = []
    for number in (2 + 2 * rank, 4 - 2 * rank, 4 + 2 * rank):  # known to both, or new to one
        with pytest.raises(BatchError) as caught:
            kinds.meet("step", rows(number))
        said.append(str(caught.value))
    kinds.meet("step", rows(6))
    with pytest.raises(ShapeLimitError):
        kinds.meet("step", rows(8))
    return said


def test_ranks_that_bring_kinds_which_differ_are_told_at_once():
    zero, one = launch(_meet, ranks=2)
    assert zero == one
    for text, (first, second) in zip(zero, ((2, 4), (4, 2), (4, 6)), strict=True):
        assert f"rank 0: x [{first}, 3] float32; rank 1: x [{second}, 3] float32" in text
