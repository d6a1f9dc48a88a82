"""The squares of many tensors, summed by one operator."""

import pytest
import torch

from stepgraph.operators.norms import SUM_OF_SQUARES, _in_pieces
from stepgraph.operators.updates import PIECE

SHAPES = {
    "none": (0, 3),
    "a number": (),
    "few": (7,),
    "flat": (3 * PIECE + 5,),
    "rows": (300, 999),
    "one long row": (1, 2 * PIECE + 1),
    "deep": (2, 3, PIECE // 2, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_sum_in_double_precision(shape, dtype):
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [torch.randn(SHAPES[shape]).to(dtype), torch.randn(2, 5).to(dtype)]
    if tensors[0].dim() > 1:
        tensors.append(tensors[0].transpose(0, -1))
    expected = sum(tensor.double().square().sum() for tensor in tensors)
    found = SUM_OF_SQUARES(tensors, wide)
    assert found.dtype == wide and found.shape == ()
    assert found.double() == pytest.approx(expected.item(), rel=1e-6)


def test_many_equal_numbers_are_not_lost():
    large = torch.full((6_000_000,), 0.1)
    found = SUM_OF_SQUARES([large], torch.float32).item()
    assert found == pytest.approx(large.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_small_and_all_there_is(shape):
    tensor = torch.arange(torch.Size(SHAPES[shape]).numel()).reshape(SHAPES[shape])
    for given in (tensor, tensor.transpose(0, -1) if tensor.dim() > 1 else tensor):
        pieces = list(_in_pieces(given))
        assert max(piece.numel() for piece in pieces) <= PIECE
        assert torch.equal(torch.cat([p.flatten() for p in pieces]).sort()[0], tensor.flatten())
