"""Sizes as texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import UsageError
from stepgraph.planning.sizes import parse_size, show_bytes, show_bytes_up


@pytest.mark.parametrize(
    ("size", "expected"),
    [("70GiB", 70 * 2**30), ("1.5 MiB", 1.5 * 2**20), (123, 123), ("5GB", 5e9), (None, None)],
)
def test_sizes_are_written_in_several_ways(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["much", "-1GiB", 0, -5, "5 parsecs", 1.5, True, "GiB"])
def test_what_is_no_size(size):
    with pytest.raises(UsageError, match="memory budget"):
        parse_size(size)


def test_sizes_are_shown_in_the_largest_unit():
    assert [show_bytes(n) for n in (12 * 2**10, 5 * 2**20, 3 * 2**29)] == [
        "12 KiB",
        "5.0 MiB",
        "1.50 GiB",
    ]


@given(st.one_of(st.integers(1, 2**22), st.integers(1, 2**45)))
def test_what_is_rounded_up_is_enough(size):
    shown = parse_size(show_bytes_up(size))
    assert size <= shown <= size * 1.1 + 2**10
    assert show_bytes_up(size).split()[1] == show_bytes(size).split()[1]
