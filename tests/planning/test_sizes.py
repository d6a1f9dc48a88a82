"""Sizes as texts."""

import pytest

from stepgraph.errors import UsageError
from stepgraph.planning.sizes import parse_size, show_bytes


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
