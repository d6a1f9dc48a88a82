"""wires: communicators beside each other, and what they share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.cost.simulate import Wires

NEAR, FAR = "near", "far"


def ends(wires, starts):
    """When collectives end that are queued as (mesh dimension, seconds, time)."""
    found = Wires(wires)
    flights = [found.start(None, *each) for each in starts]
    assert found.end() == max(flight.end for flight in flights)
    return [flight.end for flight in flights]


def test_a_communicator_runs_one_after_the_other():
    assert ends({"dp": NEAR}, [("dp", 10.0, 0.0), ("dp", 4.0, 1.0)]) == [10.0, 14.0]


def test_two_communicators_share_their_wires():
    both = {"dp": NEAR, "tp": NEAR}
    assert ends(both, [("dp", 10.0, 0.0), ("tp", 4.0, 0.0)]) == [14.0, 8.0]
    assert ends(both, [("dp", 10.0, 0.0), ("tp", 2.0, 4.0)]) == [12.0, 8.0]


def test_on_wires_of_their_own_they_do_not_see_each_other():
    apart = {"dp": FAR, "tp": NEAR}
    assert ends(apart, [("dp", 10.0, 0.0), ("tp", 4.0, 2.0)]) == [10.0, 6.0]


def test_an_idle_wire_begins_when_it_is_asked():
    wires = Wires({"dp": NEAR})
    first = wires.start(None, "dp", 1.0, 0.0)
    second = wires.start(None, "dp", 1.0, 5.0)
    assert (wires.end_of(first), wires.end_of(second)) == (1.0, 6.0)
    assert second.start == 5.0


def test_asking_for_an_end_changes_nothing():
    asked, other = Wires({"dp": NEAR, "tp": NEAR}), Wires({"dp": NEAR, "tp": NEAR})
    for wires in (asked, other):
        first = wires.start(None, "dp", 4.0, 0.0)
        if wires is asked:
            assert wires.end_of(first) == 4.0
        wires.start(None, "tp", 4.0, 4.0)
    assert [f.end for f in asked.flights if asked.end()] == [
        f.end for f in other.flights if other.end()
    ]


STARTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0.1, 5.0), st.floats(0.0, 3.0)),
    min_size=1,
    max_size=12,
)


@given(STARTS)
def test_shared_wires_carry_no_more_and_no_less_than_one(drawn):
    starts, now = [], 0.0
    for mesh_dim, seconds, gap in drawn:
        now += gap
        starts.append((mesh_dim, seconds, now))
    alone = ends({"a": NEAR}, [("a", *rest) for _, *rest in starts])
    shared = ends(dict.fromkeys("abc", NEAR), starts)
    assert max(shared) == pytest.approx(max(alone))
    for (_, seconds, at), end in zip(starts, shared, strict=True):
        assert end >= at + seconds - 1e-9
