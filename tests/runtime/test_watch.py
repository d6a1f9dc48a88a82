"""What a rank concludes of what the others have told of their calls."""

import json

import pytest

from stepgraph.errors import RanksDifferError
from stepgraph.runtime.record import Record
from stepgraph.runtime.watch import Watch


class Store(dict):
    """The store of two ranks; ``first`` is what happens while rank 1 looks at what rank 0 told."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key == "calls/0" or key in self for key in keys)

    def get(self, key):
        if key != "calls/0":
            return super().get(key)
        self.first(self)
        return json.dumps([3, [5], []]).encode()


def second_rank(first):
    watch = object.__new__(Watch)  # without its thread, and the ranks that it would ask for
    watch.rank, watch.size = 1, 2
    watch.record, watch._store = Record(), Store(first)
    for _ in range(3):
        watch.record.tell(("step", 0))
    return watch


def test_a_rank_that_changed_too_and_has_gone_on_is_no_contradiction():
    watch = second_rank(lambda store: store.set("changes/3/0", "7"))
    watch.changes_to(7)


def test_a_rank_that_goes_on_with_what_it_had_is_one():
    watch = second_rank(lambda store: None)
    with pytest.raises(RanksDifferError, match="another one than before on rank 1 alone"):
        watch.changes_to(7)
    assert b"rank 1 alone" in watch._store["end"]


def test_a_rank_that_changed_to_something_else_is_one():
    watch = second_rank(lambda store: store.set("changes/3/0", "8"))
    with pytest.raises(RanksDifferError, match="runs other programs on rank 0"):
        watch.changes_to(7)
