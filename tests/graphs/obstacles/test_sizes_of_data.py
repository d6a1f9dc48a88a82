"""Results whose size depends on data, and masks that the host counts."""

import torch

from tests.graphs.programs import named, planned

aten = torch.ops.aten


def selects(y, x):
    return y[x > 0]


def positive(x):
    return aten.gt.Scalar(x, 0)


def test_rows_that_are_selected():
    assert planned(selects) == [
        "the model cannot be captured as one program: the shape of a tensor depends on data\n"
        "(test_sizes_of_data.py in selects): keep it in tensors: torch.where in place of a branch, a mask "
        "in place of a size"
    ]


def test_positions_and_what_is_computed_of_them():
    found = named(lambda x: x + aten.sum.default(aten.nonzero.default(positive(x))), (4, 4))
    assert found == [
        "net/nonzero [net] how large its result is depends on data\n(net.py): give it a fixed size: "
        "torch.where(mask, x, 0) in place of x[mask], output_size=... for repeat_interleave"
    ]


def test_a_mask_that_is_assigned_to():
    found = named(lambda x: aten.index_put.default(x, [positive(x)], aten.sum.default(x)), (4, 4))
    assert found == [
        "net/index_put [net] a boolean mask as an index becomes positions, which the host counts\n"
        "(net.py): write torch.where(mask, values, x) in place of x[mask] = values"
    ]


def test_rows_by_number_are_none():
    assert not named(lambda x: aten.index.Tensor(x, [aten.argmax.default(x, -1)]), (4, 4))
