"""What is kept of a compilation: found again, never believed, made once by many.

What is compiled here is a file in the folder that inductor would use, whose text is the result.
"""

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stepgraph.lowering import inductor
from stepgraph.lowering.cache import Cache, clear, damage, entries, folder_of_cache
from tests.support import HOST

ROOT = Path(__file__).parents[2]
RIGHT = "the result"


class Compiler:
    """Does as inductor does: takes what it finds, whatever that is, and otherwise makes it."""

    def __init__(self, result=RIGHT, seconds=0.0):
        self.result, self.seconds, self.compiled = result, seconds, 0

    def __call__(self):
        file = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "code", "kernel.so")
        if not file.exists():
            time.sleep(self.seconds)
            self.compiled += 1
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.result)
            (file.parent / "source.cpp").write_text(self.result[:3])
        (file.parent / "kernel.lock").write_text("")
        return file.read_text()


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "kept")


def one(cache, text, make):
    (made,) = cache.compiled([(text, make)])
    return made


def only(cache):
    (entry,) = entries(cache.root)
    return entry.folder


def test_the_second_time_nothing_is_compiled(cache):
    first, second = Compiler(), Compiler()
    assert one(cache, "a", first) == one(Cache(cache.root), "a", second) == RIGHT
    assert (first.compiled, second.compiled) == (1, 0)
    assert damage(only(cache)) is None


def test_another_text_is_another_entry(cache):
    one(cache, "a", Compiler("one"))
    assert one(cache, "b", Compiler("two")) == "two"
    assert len(entries(cache.root)) == 2


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (lambda: torch.set_num_threads(3), torch.set_num_threads),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda _: torch.set_default_dtype(torch.float32),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda _: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda _: torch.set_float32_matmul_precision("highest"),
        ),
    ],
)
def test_what_code_is_generated_for_is_another_entry(cache, change, back):
    threads = torch.get_num_threads()
    one(cache, "a text", Compiler())
    change()
    try:
        one(cache, "a text", Compiler())
    finally:
        back(threads)
    assert len(entries(cache.root)) == 2


def test_the_environment_is_left_as_it_was(cache, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    one(cache, "a", Compiler())
    with pytest.raises(ZeroDivisionError):
        one(cache, "b", lambda: 1 / 0)
    assert not os.environ.keys() & {*names}
    assert len(entries(cache.root)) == 1


def test_kernels_of_a_device_are_in_the_folder_of_what_they_are_for(cache):
    found = one(cache, "a", lambda: {**os.environ})
    folder = Path(found["TORCHINDUCTOR_CACHE_DIR"])
    assert Path(found["TRITON_CACHE_DIR"]).parent == folder


def test_what_a_kernel_is_found_to_be_fastest_with_later_is_no_damage(cache):
    one(cache, "a", Compiler())
    (only(cache) / "code" / "key.best_config").write_text("{}")
    again = Compiler()
    assert one(Cache(cache.root), "a", again) == RIGHT
    assert again.compiled == 0


# ---------------------------------------------------------------------------- what is not believed


def kernel(folder):
    return folder / "code" / "kernel.so"


def truncated(folder, outside):
    kernel(folder).write_text(RIGHT[:4])


def flipped(folder, outside):
    kernel(folder).write_text(RIGHT.replace("r", "s"))


def emptied(folder, outside):
    kernel(folder).write_text("")


def missing(folder, outside):
    (folder / "code" / "source.cpp").unlink()


def another_programs_file(folder, outside):
    shutil.copy(kernel(outside), kernel(folder))


def another_programs_folder(folder, outside):
    shutil.rmtree(folder)
    shutil.copytree(outside, folder)


def added(folder, outside):
    (folder / "code" / "more.so").write_text("more")


def unreadable(folder, outside):
    kernel(folder).unlink()
    os.mkfifo(kernel(folder))


def linked_file(folder, outside):
    kernel(folder).unlink()
    kernel(folder).symlink_to(kernel(outside))


def linked_folder(folder, outside):
    shutil.rmtree(folder)
    folder.symlink_to(outside)


def list_cut_off(folder, outside):
    text = (folder / "files.json").read_text()
    (folder / "files.json").write_text(text[: len(text) // 2])


def list_of_nonsense(folder, outside):
    (folder / "files.json").write_text("[1]")


def list_linked(folder, outside):
    (folder / "files.json").unlink()
    (folder / "files.json").symlink_to(outside / "files.json")


def lock_linked(folder, outside):
    (folder / "code" / "kernel.lock").unlink(missing_ok=True)
    (folder / "code" / "kernel.lock").symlink_to(kernel(outside))


POISONS = [
    truncated, flipped, emptied, missing, another_programs_file, another_programs_folder, added, unreadable,
    linked_file, linked_folder, list_cut_off, list_of_nonsense, list_linked, lock_linked,
]  # fmt: skip


@pytest.mark.parametrize("poison", POISONS)
def test_a_damaged_entry_is_compiled_again_with_a_note(poison, cache, tmp_path, caplog):
    other = Cache(tmp_path / "other")
    one(other, "b", Compiler("wrong"))
    one(cache, "a", Compiler())
    poison(only(cache), only(other))
    again = Compiler()
    with caplog.at_level(logging.WARNING, "stepgraph"):
        assert one(cache, "a", again) == RIGHT
    assert again.compiled == 1
    assert "compiled again, what was kept in" in caplog.text and "is damaged" in caplog.text
    caplog.clear()
    assert one(cache, "a", Compiler(None)) == RIGHT and not caplog.text
    assert kernel(only(other)).read_text() == "wrong"  # nothing outside was touched


def test_what_was_broken_off_is_made_again(cache, caplog):
    one(cache, "a", Compiler())
    (only(cache) / "files.json").unlink()  # as a process leaves it that is killed before
    again = Compiler()
    assert one(cache, "a", again) == RIGHT and again.compiled == 1
    assert "files.json" in caplog.text


def test_a_folder_that_others_may_write_is_not_used(tmp_path, caplog):
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    cache = Cache(root)
    assert [one(cache, "a", Compiler()) for _ in range(2)] == [RIGHT, RIGHT]
    assert not entries(root) and caplog.text.count("others may write there") == 1


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "kept")
    assert one(cache, "a", Compiler()) == RIGHT
    assert "cannot keep what is compiled: Not a directory" in caplog.text


FULL = """
import logging, os, sys
from pathlib import Path
from stepgraph.lowering.cache import Cache, entries
root = Path(sys.argv[1], "kept")

def make():
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    (folder / "kernel.so").write_bytes(bytes(2**20))
    return "made in " + folder.name

cache = Cache(root)
print([cache.compiled([(text, make)])[0] for text in "ab"], entries(root))
"""


def test_a_full_disk(tmp_path):
    small, elsewhere = tmp_path / "small", tmp_path / "elsewhere"
    small.mkdir(), elsewhere.mkdir()
    code = [sys.executable, "-c", FULL, str(small)]
    mounted = f"mount -t tmpfs -o size=256k none {small} && exec "
    command = ["unshare", "-rm", "sh", "-c", mounted + '"$@"', "sh", *code]
    if subprocess.run([*command[:4], mounted + "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(elsewhere)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['made in elsewhere', 'made in elsewhere'] []", done.stderr
    assert done.stderr.count("cannot keep what is compiled: the file system is full") == 1


# ---------------------------------------------------------------------------- many at once


def test_those_who_come_meanwhile_wait_and_find_it(cache):
    compilers = [Compiler(seconds=0.5) for _ in range(4)]
    with multiprocessing.get_context("fork").Pool(4) as pool:
        jobs = [pool.apply_async(compiled_by, (cache.root, "a", one)) for one in compilers]
        found = [job.get(60) for job in jobs]
    assert [result for result, _ in found] == [RIGHT] * 4
    assert sorted(count for _, count in found) == [0, 0, 0, 1]


def test_those_who_want_the_same_share_the_work(cache):
    compilers = [[Compiler(text, seconds=0.4) for text in "abcd"] for _ in range(2)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        jobs = [pool.apply_async(several, (cache.root, mine)) for mine in compilers]
        found = [job.get(60) for job in jobs]
    assert [results for results, _ in found] == [[*"abcd"]] * 2
    counts = [count for _, count in found]
    assert sum(counts) == 4 and min(counts) >= 1


def several(root, compilers):
    made = Cache(root).compiled([(compiler.result, compiler) for compiler in compilers])
    return made, sum(compiler.compiled for compiler in compilers)


def compiled_by(root, text, compiler):
    return one(Cache(root), text, compiler), compiler.compiled


class Adding(Compiler):
    """One that adds to what it finds, as inductor does for other settings, and reads on."""

    def __call__(self):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (folder / "of other settings").write_text("as well")
        time.sleep(self.seconds)
        return super().__call__()


def test_what_somebody_adds_to_is_not_taken_for_damaged(cache):
    one(cache, "a", Compiler())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first = pool.apply_async(compiled_by, (cache.root, "a", Adding(seconds=1.0)))
        while not [*cache.root.glob("*/of other settings")]:
            time.sleep(0.01)
        second = pool.apply_async(compiled_by, (cache.root, "a", Compiler()))
        assert [job.get(60) for job in (first, second)] == [(RIGHT, 0)] * 2


def test_a_failure_lets_the_others_go_on(cache):
    def fails():
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        one(cache, "a", fails)
    assert one(cache, "a", Compiler()) == RIGHT


def test_files_that_cannot_be_locked_are_no_obstacle(cache, monkeypatch):
    def acquire(*_, **__):
        raise OSError("read-only file system")

    monkeypatch.setattr("stepgraph.lowering.cache.FileLock.acquire", acquire)
    assert one(cache, "a", Compiler()) == RIGHT


def test_the_largest_comes_first(cache):
    order = []
    wanted = [(text, lambda text=text: order.append(text)) for text in ("bb", "a", "ccc")]
    assert cache.compiled(wanted) == [None] * 3
    assert order == ["ccc", "bb", "a"]


# ---------------------------------------------------------------------------- how much is kept


def aged(cache, text, seconds):
    known = {entry.folder for entry in entries(cache.root)}
    one(cache, text, Compiler(text * 1000))
    (folder,) = {entry.folder for entry in entries(cache.root)} - known
    os.utime(folder, (time.time() - seconds,) * 2)
    return folder


def test_what_was_unused_for_longest_goes_first(tmp_path):
    cache = Cache(tmp_path, limit=2500)
    old, older = aged(cache, "a", 7200), aged(cache, "b", 9000)
    new = aged(cache, "c", 0)
    assert {entry.folder for entry in entries(tmp_path)} == {old, new}
    assert not older.exists()


def test_what_may_be_in_use_stays(tmp_path):
    cache = Cache(tmp_path, limit=10)
    for text in "abc":
        one(cache, text, Compiler(text * 1000))
    assert len(entries(tmp_path)) == 3


def test_clearing(cache):
    assert clear(cache.root / "nothing") == 0
    one(cache, "a", Compiler())
    assert clear(cache.root) == len(RIGHT) + 3
    assert not cache.root.exists()
    assert one(Cache(cache.root), "a", Compiler()) == RIGHT


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of_cache() == tmp_path / "stepgraph" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of_cache() == tmp_path / ".cache" / "stepgraph" / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert folder_of_cache() == tmp_path / "mine" / "stepgraph"


def test_other_passes_of_ours_are_another_entry(monkeypatch):
    """Else what was kept would be taken for found, and each rank would compile it for itself."""
    module = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    placeholder.meta["val"] = torch.ones(2)
    text, _ = inductor._wanted(module, [placeholder], HOST)
    assert text == inductor._wanted(module, [placeholder], HOST)[0]
    monkeypatch.setattr(inductor, "digest_of_passes", lambda ours: b"others")
    assert text != inductor._wanted(module, [placeholder], HOST)[0]
