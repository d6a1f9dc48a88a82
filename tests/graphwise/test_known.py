"""How ranks have tensors, as far as it is known."""

import gc

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.graphwise.known import Known


def test_tensors_are_known_by_identity_as_long_as_they_live():
    known, rows = Known(), torch.ones(3)
    known[rows] = Shard(0)
    assert known[rows] == Shard(0) and known[torch.ones(3)] is None and known[3] is None
    known.forget(rows)
    assert known[rows] is None
    known[torch.zeros(2)] = Shard(0)
    gc.collect()
    assert not len(known._found)


def test_a_sum_that_code_writes_into_is_not_known_any_more():
    known, total, rows = Known(), torch.ones(()), torch.ones(3)
    known.update([(total, Partial("sum")), (rows, Shard(0))])
    total.mul_(0.5), rows.mul_(0.5)
    assert known[total] is None and known[rows] == Shard(0)
    known[total] = Partial("sum")
    assert known[total] == Partial("sum")


def test_tensors_of_inference_mode_are_known():
    known = Known()
    with torch.inference_mode():
        total = torch.ones(())
        known[total] = Partial("sum")
    assert known[total] == Partial("sum")


def test_sums_that_neither_a_graph_reads_nor_a_call_returns_are_left():
    known, read, returned, left = Known(), *torch.ones(3)
    for total in (read, returned):
        known.made(total, Partial("sum"))
    known.made(left, Replicate())
    assert known[read] and not known.sums_left([returned])
    known.made(left, Partial("max"))
    assert known.sums_left([returned]) and not known.sums_left([])
