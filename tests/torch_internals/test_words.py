"""Words of memory, compared at once."""

import array

import numpy as np

from stepgraph.torch_internals.words import Snapshot, Together


def snapshot(memory, places, behind=()):
    """Of an array, as it is now."""
    start, _ = memory.buffer_info()
    words, words_behind = (
        np.array([memory[i] for i in which], np.uint64).tobytes() for which in (places, behind)
    )
    addresses, addresses_behind = ([start + 8 * i for i in which] for which in (places, behind))
    return Snapshot(addresses, words, addresses_behind, words_behind, [memory])


def test_several_are_the_same_until_any_word_is_another():
    memory = array.array("Q", range(9))
    together = Together([snapshot(memory, [5, 1]), snapshot(memory, [1, 7], [3])])
    assert together.same()
    memory[2] = 0  # nobody's
    assert together.same()
    for place in (1, 3, 5, 7):
        memory[place] += 1
        assert not together.same()
        memory[place] -= 1
        assert together.same()


def test_a_word_that_two_remember_otherwise_is_never_the_same():
    memory = array.array("Q", range(9))
    before = snapshot(memory, [4])
    memory[4] = 99
    assert not Together([before, snapshot(memory, [4])]).same()
    assert not Together([snapshot(memory, [4]), before]).same()


def test_nothing_is_always_the_same():
    assert Together([Snapshot(), Snapshot()]).same()
