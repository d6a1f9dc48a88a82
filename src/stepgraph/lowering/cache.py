"""What was compiled is kept on disk: a second start compiles nothing, and ranks compile a thing once.

Whatever is compiled by itself has a folder, which inductor takes for its whole cache; what it finds there
is chosen by inductor's own key (operations, shapes, settings, versions, device). A list of the files, with
their digests, is written last: a folder without one, or with other files than it says, is emptied. The
processes of a machine that come to the same thing wait for the first of them, and find what it made.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

from stepgraph.lowering.kernels import IN_USE, Kernels, digest_of
from stepgraph.torch_internals import compiler
from stepgraph.torch_internals.together import libraries_from

log = logging.getLogger("stepgraph")

T = TypeVar("T")

LIMIT = 4 * 2**30  # bytes that are kept
_LIST = "files.json"
_BESIDE = ("locks", "kernels")  # folders that are no entries
# Written while code runs; the second says which of a kernel's shapes was fastest, on a device.
_LATER = (".lock", ".best_config")
_SPARE = 16 * 2**20  # bytes: a file system with less is full
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def folder_of_cache() -> Path:
    """``~/.cache/stepgraph/compiled``, or in the folder that ``TORCHINDUCTOR_CACHE_DIR`` names.

    Of a user without a home, in the folder for temporary files.
    """
    if given := compiler.chosen_cache_directory():
        return Path(given, "stepgraph")
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home, as in some containers
            base = str(Path(tempfile.gettempdir()) / f"stepgraph_{os.getuid()}")
    return Path(base) / "stepgraph" / "compiled"


@dataclass(frozen=True)
class Entry:
    """One thing that was compiled: where, of how many bytes, and when it was last used (seconds)."""

    folder: Path
    bytes: int
    used: float


def entries(root: Path) -> list[Entry]:
    """What is kept, longest unused first."""
    found = []
    for folder in root.glob("*/"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.name not in _BESIDE:
                sizes = (path.lstat().st_size for path in _paths(folder))
                found.append(Entry(folder, sum(sizes), folder.lstat().st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def clear(root: Path) -> int:
    """Removes all that is kept.

    Returns:
        how many bytes that were.
    """
    removed = sum(entry.bytes for entry in entries(root))
    if root.exists():
        shutil.rmtree(root)
    return removed


class Cache:
    """The cache, as one lowering finds it: unusable, it says so once, and everything is compiled anew."""

    def __init__(self, root: Path | None = None, limit: int = LIMIT) -> None:
        self.root, self.limit = root or folder_of_cache(), limit
        self._kernels = Kernels(self.root / "kernels")
        self._usable = compiler.caches() and self._made()

    def _made(self) -> bool:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.root / "locks").mkdir(exist_ok=True)
            found = self.root.stat()
            if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
                self._note("others may write there")
                return False
            return os.access(self.root, os.W_OK)
        except OSError as error:
            self._note(error.strerror or str(error))
            return False

    def _note(self, why: str) -> None:
        log.warning("%s cannot keep what is compiled: %s", self.root, why)

    def compiled(self, wanted: Sequence[tuple[str, Callable[[], T]]]) -> list[T]:
        """What each of several compiles; another process that wants the same compiles a part of them.

        Args:
            wanted: a text that tells each from whatever else is compiled (what it depends on besides,
                inductor knows), and what compiles it.
        """
        made: dict[int, T] = {}
        order = sorted(range(len(wanted)), key=lambda number: -len(wanted[number][0]))
        for waits in (False, True):  # what others are at is left until there is nothing else to do
            for number in order:
                text, make = wanted[number]
                if number not in made:
                    try:
                        made[number] = self._compiled(text, make, waits)
                    except Timeout:
                        if waits:
                            raise
        return [made[number] for number in range(len(wanted))]

    def _compiled(self, text: str, make: Callable[[], T], waits: bool) -> T:
        if not self._usable:
            return make()
        name = hashlib.sha256(repr((text, _surroundings())).encode()).hexdigest()[:40]
        folder = self.root / name
        with self._in_use(name):
            if damage(folder) is None:
                return self._found(folder, make)
        try:
            with self._alone(name, waits):
                with self._in_use(name, by_nobody=True):
                    what = damage(folder)  # the first of several has been here meanwhile
                if what is not None:
                    return self._compiled_anew(folder, what, make)
        except _FullError as full:
            self._usable = False
            self._note(str(full))
            return make()
        with self._in_use(name):
            return self._found(folder, make)

    @contextlib.contextmanager
    def _alone(self, name: str, waits: bool) -> Iterator[None]:
        """Where files cannot be locked, everybody is.

        Raises:
            Timeout: another process is at it, and this one does not wait.
        """
        with contextlib.ExitStack() as held:
            try:
                lock = FileLock(self.root / "locks" / name)
                held.enter_context(lock.acquire(blocking=waits))
            except Timeout:
                raise
            except (OSError, NotImplementedError):
                pass
            yield

    @contextlib.contextmanager
    def _in_use(self, name: str, by_nobody: bool = False) -> Iterator[None]:
        """Whoever reads a folder may add to it, and until that is listed it looks damaged to others."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                lock = held.enter_context((self.root / "locks" / f"{name}.use").open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX if by_nobody else fcntl.LOCK_SH)
            yield

    def _found(self, folder: Path, make: Callable[[], T]) -> T:
        listed = _read_list(folder)["files"]
        with compiler.cache_in(folder), compiler.without_headers():
            made = make()
        with contextlib.suppress(OSError):
            os.utime(folder)
            if {_relative(path, folder) for path in _paths(folder)} != {*listed}:
                _write_list(folder)  # for other settings than before
        return made

    def _compiled_anew(self, folder: Path, damaged: str, make: Callable[[], T]) -> T:
        if damaged:
            log.warning("compiled again, what was kept in %s is damaged: %s", folder, damaged)
        try:
            _remove(folder)
            folder.mkdir(mode=0o700)
            with compiler.cache_in(folder), libraries_from(self._kernels.provide):
                made = make()
            with contextlib.suppress(FileNotFoundError):  # somebody clears the cache meanwhile
                _write_list(folder)
        except Exception as error:
            with contextlib.suppress(OSError):
                _remove(folder)
            if getattr(error, "errno", None) in _FULL or _free(self.root) < _SPARE:
                raise _FullError("the file system is full") from error
            raise
        self._shrink()
        return made

    def _shrink(self) -> None:
        """Removes what was unused for longest, down to the limit; never what may be in use."""
        self._kernels.forget()
        kept = entries(self.root)
        excess = sum(entry.bytes for entry in kept) - self.limit
        for entry in kept:
            if excess <= 0 or time.time() - entry.used < IN_USE:
                return
            with contextlib.suppress(OSError):
                shutil.rmtree(entry.folder)
                for lock in (self.root / "locks").glob(f"{entry.folder.name}*"):
                    lock.unlink()
            excess -= entry.bytes


class _FullError(Exception):
    """There is no room to keep anything."""


def damage(folder: Path) -> str | None:
    """What is wrong with a folder; empty: nothing was kept in it; None: all is as its list says."""
    if not folder.is_symlink() and not folder.exists():
        return ""
    try:
        if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            return "it is a link, or another user's"
        files = _read_list(folder)["files"]
        found = {_relative(path, folder): path for path in _paths(folder)}
        if found.keys() != files.keys():
            return f"other files than its list says: {sorted(found.keys() ^ files.keys())[0]}"
        for name, path in found.items():
            if path.lstat().st_uid != os.getuid() or digest_of(path) != files[name]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _paths(folder: Path) -> Iterator[Path]:
    """All files but the list and what inductor writes while code runs; a link is a file."""
    for path in folder.rglob("*"):
        is_file = path.is_symlink() or not path.is_dir()
        is_later = path.suffix in _LATER and not path.is_symlink()
        if is_file and not is_later and path != folder / _LIST:
            yield path


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


def _read_list(folder: Path) -> dict[str, Any]:
    """The list of a folder.

    Raises:
        OSError, ValueError, TypeError: it cannot be read, or is another folder's.
    """
    path = folder / _LIST
    if path.is_symlink():
        raise OSError(f"{_LIST} is a link")
    found = json.loads(path.read_text())
    if found["name"] != folder.name:
        raise ValueError(f"its list is that of {found['name']}")
    return found


def _write_list(folder: Path) -> None:
    """Says what a folder holds, all at once."""
    files = {_relative(path, folder): digest_of(path) for path in _paths(folder)}
    new = folder.parent / "locks" / f"{folder.name}.{os.getpid()}"
    new.write_text(json.dumps({"name": folder.name, "files": files}))
    new.replace(folder / _LIST)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _free(root: Path) -> int:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return 0


def _surroundings() -> tuple:
    """What code is compiled for, besides what inductor looks at itself."""
    return torch.__version__, platform.python_version(), platform.machine(), compiler.settings()
