"""Peers wait for the first of them, and not for more."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepgraph.lowering.once import compiled_once

SECONDS = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def compile_slowly(code, began, end, log):
    with compiled_once(code):
        began.set()
        end.wait(SECONDS)
        log.append("first")


def compile_behind(code, log):
    with compiled_once(code):
        log.append("peer")


def side_by_side(first, other):
    """What ends first where one compiles ``other`` while another is at ``first``."""
    began, end, log = threading.Event(), threading.Event(), []
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(compile_slowly, first, began, end, log)
        assert began.wait(SECONDS)
        peer = pool.submit(compile_behind, other, log)
        done = not_waiting(peer)
        end.set()
        slow.result(SECONDS)
        peer.result(SECONDS)
    return done, log


def not_waiting(future):
    try:
        future.result(0.5)
    except TimeoutError:
        return False
    return True


def test_a_peer_waits_for_the_first():
    assert side_by_side("a", "a") == (False, ["first", "peer"])


def test_other_programs_do_not_wait():
    assert side_by_side("a", "b") == (True, ["peer", "first"])


def test_without_a_cache_nobody_waits(monkeypatch):
    monkeypatch.setattr("stepgraph.lowering.once.caches", lambda: False)
    assert side_by_side("a", "a") == (True, ["peer", "first"])


def test_a_failure_lets_the_peers_go_on():
    with pytest.raises(ValueError, match="no compiler"), compiled_once("a"):
        raise ValueError("no compiler")
    with compiled_once("a"):
        pass


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch):
    def acquire(*_, **__):
        raise OSError("read-only file system")

    monkeypatch.setattr("stepgraph.lowering.once.FileLock.acquire", acquire)
    log = []
    compile_behind("a", log)
    assert log == ["peer"]
