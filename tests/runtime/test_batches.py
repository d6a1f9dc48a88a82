"""Batches: pytrees of tensors that agree in dimension 0."""

import enum

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.errors import BatchError
from stepgraph.runtime.batches import (
    _check_devices,
    flatten_batch,
    global_spec,
    split_micro_batches,
)
from stepgraph.torch_internals import pytree

CPU = torch.device("cpu")


def flat(batch):
    return flatten_batch(batch, CPU)


def test_leaves_have_paths_and_constants_are_part_of_the_key():
    batch = flat({"x": torch.ones(4, 2), "more": [torch.ones(4), None, "causal"]})
    assert set(batch.paths) >= {"x", "more.0"}
    assert batch.shapes() == "more.0 [4] float32, x [4, 2] float32" or "x [4, 2]" in batch.shapes()
    other = flat({"x": torch.ones(4, 2), "more": [torch.ones(4), None, "full"]})
    assert batch.key != other.key


@pytest.mark.parametrize("batch", [{}, [], None, 3, {"x": 1.0}, {"x": torch.tensor(1.0)}])
def test_a_batch_without_rows_is_an_error(batch):
    with pytest.raises(BatchError, match="must hold tensors whose dimension 0"):
        flat(batch)


def test_a_batch_on_two_accelerators_names_the_tensors():
    mode = torch_internals.new_fake_mode()
    with mode:
        x, y = torch.empty(4, 2, device="cuda:0"), torch.empty(4, device="cuda:1")
        moved = {"x": x, "y": torch.empty(4)}
    with pytest.raises(BatchError, match="x on cuda:0, y on cuda:1"):
        flat({"x": x, "y": y})
    flat({"x": torch.ones(4, 2), "y": torch.ones(4)})
    _check_devices(list(moved.items()))  # the loader left one of them on the host


def test_tensors_that_disagree_on_the_rows_are_named():
    with pytest.raises(BatchError, match="x has 4, y has 3"):
        flat({"x": torch.ones(4), "y": torch.ones(3)})


def test_micro_batches_are_equal_slices_and_numbers_are_shared():
    batch = flat((torch.arange(6), torch.tensor(2.0), "k"))
    pieces = split_micro_batches(batch, 3)
    assert [piece[0].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece[1].item() == 2.0 and piece[2] == "k" for piece in pieces)


@pytest.mark.parametrize(("rows", "count"), [(5, 2), (2, 4), (0, 2)])
def test_rows_that_do_not_divide_are_an_error(rows, count):
    with pytest.raises(BatchError, match=f"{rows} rows, which do not divide into {count}"):
        split_micro_batches(flat(torch.ones(rows, 2)), count)


def test_the_global_batch_is_that_of_one_micro_batch_on_all_ranks():
    spec = global_spec(
        flat((torch.ones(6, 5), torch.tensor(1.0))), micro_batches=3, data_parallel=4
    )
    assert [tuple(leaf.shape) for leaf in spec.tensors] == [(8, 5), ()]


def test_keys_of_any_kind_in_any_order_are_told_apart():
    x, y = torch.ones(4, 2), torch.ones(4)
    for batch in (flat({("a", 1): x, 3: y}), flat({3: y, ("a", 1): x})):
        assert {path: leaf.dim() for path, leaf in zip(batch.paths, batch.leaves, strict=True)} == {
            "('a', 1)": 2,
            "3": 1,
        }
    assert flat({"x": x, "y": y}).tree == flat({"x": x, "y": torch.nn.Parameter(y, False)}).tree


class Key(enum.StrEnum):
    x = "x"


@pytest.mark.parametrize("keys", [("x", Key.x), (Key.x, "x"), (1, True), (True, 1)])
def test_equal_keys_of_two_types_stay_what_they_are(keys):
    for key in keys:
        (found,) = pytree.tree_unflatten([0], flat({key: torch.ones(4)}).tree)
        assert type(found) is type(key)
