"""index_rows_in_place: an index that counts the rows of a batch selects columns only."""

import pytest
import torch
from torch import nn

from stepgraph.capture.passes.drop_identities import drop_identities
from stepgraph.capture.passes.index_rows_in_place import index_rows_in_place
from tests.support import (
    assert_bitwise,
    assert_golden,
    captured,
    tiny_llama,
    token_batch,
    values,
)

aten = torch.ops.aten


class Indexed(nn.Module):
    """``mask[rows, columns]`` for indices made of counters."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.rows, self.columns = rows, columns

    def forward(self, mask):
        return (mask[self.rows(), self.columns()] * self.weight).sum()


def indices(program):
    return [node for node in program.operations() if node.target is aten.index.Tensor]


def simplified(model, batch):
    program = drop_identities(captured(model, batch))
    return program, index_rows_in_place(program.copy())


IN_ORDER = {
    "a column of counters": (lambda: torch.arange(3)[:, None], lambda: torch.arange(2) + 1),
    "as attention masks do": (
        lambda: torch.arange(3)[:, None, None, None],
        lambda: torch.arange(4)[None, None, :],
    ),
}
OUT_OF_ORDER = {
    "rows backwards": (lambda: 2 - torch.arange(3)[:, None], lambda: torch.arange(4)),
    "rows twice": (lambda: torch.arange(3)[:, None] // 2, lambda: torch.arange(4)),
    "a pair per row": (lambda: torch.arange(3), lambda: torch.arange(3)),
    "fewer rows": (lambda: torch.arange(2)[:, None], lambda: torch.arange(4)),
    "columns per row": (
        lambda: torch.arange(3)[:, None],
        lambda: torch.arange(3)[:, None] + torch.arange(2),
    ),
}


def test_the_rows_stay_where_they_are():
    program, after = simplified(Indexed(*IN_ORDER["a column of counters"]), torch.ones(3, 4))
    assert indices(program) and not indices(after)
    assert_golden(__file__, "index_rows_in_place", program, after)


@pytest.mark.parametrize("name", [*IN_ORDER, *OUT_OF_ORDER])
def test_every_result_is_the_same_bits(name):
    model, batch = Indexed(*(IN_ORDER | OUT_OF_ORDER)[name]), torch.rand(3, 4)
    program, after = simplified(model, batch)
    assert bool(indices(after)) == (name in OUT_OF_ORDER)
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(after))


def test_a_transformers_padding_mask_needs_no_index_across_the_batch():
    model, batch = tiny_llama(layers=1), token_batch()
    program, after = simplified(model, batch)
    assert indices(program) and not indices(after)
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(after))


def test_an_index_that_is_part_of_the_batch_stays():
    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, mask, rows):
            return (mask[rows[:, None], torch.arange(4)] * self.weight).sum()

    _, after = simplified(Gathered(), (torch.ones(3, 4), torch.arange(3)))
    assert indices(after)


class Put(nn.Module):
    """A one in each row of zeros, where the batch says, as block masks are turned."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.rows = rows

    def forward(self, columns):
        table = columns.new_zeros((*columns.shape[:-1], 6)).float()
        table[self.rows(), torch.arange(2)[:, None], columns] = table.new_ones(())
        return (table * self.weight).sum()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_number_that_is_put_into_each_row_stays_there(in_order):
    rows = {True: IN_ORDER, False: OUT_OF_ORDER}[in_order]
    count = rows["a column of counters" if in_order else "rows backwards"][0]
    model, batch = Put(lambda: count()[..., None]), torch.randint(0, 6, (3, 2, 4))
    program, after = simplified(model, batch)
    puts = [node for node in after.operations() if node.target is aten.index_put.default]
    assert bool(puts) != in_order
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(after))
