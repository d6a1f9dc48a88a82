"""What a rank tells of its calls, and what it adds up to."""

import threading

from stepgraph.runtime.record import KEPT, Record


def told(*calls):
    record = Record()
    for shown, digest, runs in calls:
        record.tell((shown, digest))
        for run in runs:
            record.tell(run)
    return record


def test_calls_are_counted_and_remembered_with_what_ran_in_the_last():
    number, runs, calls = told(("step", 1, [5, 6]), ("evaluate", 2, [7])).now()
    assert (number, runs) == (2, [7])
    assert [shown for _, shown in calls.values()] == ["step", "evaluate"]


def test_it_is_the_same_whenever_it_is_added_up():
    whole = told(("step", 1, [5, 6]), ("step", 1, [5]), ("step", 1, []))
    parts = Record()
    for told_now in (("step", 1), 5, 6, ("step", 1), 5, ("step", 1)):
        parts.tell(told_now)
        parts.add_up()
    assert whole.now() == parts.now()


def test_what_ran_in_a_call_is_told_apart_when_the_next_begins():
    one, other = told(("step", 1, [5]), ("step", 1, [])), told(("step", 1, [6]), ("step", 1, []))
    assert one.now()[2][1] == other.now()[2][1]
    assert one.now()[2][2] != other.now()[2][2]


def test_only_the_last_calls_are_remembered():
    number, _, calls = told(*[("step", 1, [5])] * (KEPT + 9)).now()
    assert number == KEPT + 9 and [*calls] == [*range(10, KEPT + 10)]


def test_readers_on_several_threads_see_whole_moments():
    record, wrong, over = Record(), [], threading.Event()

    def read():
        while not over.is_set():
            number, runs, calls = record.now()
            if len(calls) != min(number, KEPT) or not set(runs) <= {number}:
                wrong.append((number, runs))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 5000):
        record.tell(("step", 1))
        record.tell(number)
    over.set()
    for reader in readers:
        reader.join()
    assert not wrong and record.now()[:2] == (4999, [4999])


def test_it_counts_on_when_nobody_reads_it():
    record = told(("step", 1, [5]))
    record.close()
    record.tell(("step", 1))
    record.tell(6)
    assert not record._told and record.now()[:2] == (2, [6])
    assert record.now() == told(("step", 1, [5]), ("step", 1, [6])).now()
