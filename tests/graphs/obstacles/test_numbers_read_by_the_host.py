"""A number of the device that the host reads: .item(), a branch, torch.equal."""

import torch

from tests.graphs.programs import named, planned

aten = torch.ops.aten
DO = "keep it a tensor: torch.where in place of a branch, a mask in place of a size"


def branches(y, x):
    return y if x.sum() > 0 else -y


def multiplies(y, x):
    return y * x.sum().item()


def reads(x):
    return aten.mul.Tensor(x, aten._local_scalar_dense.default(aten.sum.default(x)))


def test_a_number_that_is_read():
    assert named(reads, (4, 4)) == [
        f"net/_local_scalar_dense [net] the host reads a number of the device\n(net.py): {DO}"
    ]


def test_a_branch_on_data():
    (found,) = planned(branches)
    assert found.startswith("the model cannot be captured as one program: Data-dependent branching")
    assert "(test_numbers_read_by_the_host.py in branches: return y if x.sum() > 0" in found
    assert found.endswith(
        "make the branch a torch.where (or torch.cond), move prints and .item() out of forward"
    )


def test_a_number_that_is_kept_a_tensor_is_none():
    assert planned(multiplies) == []
