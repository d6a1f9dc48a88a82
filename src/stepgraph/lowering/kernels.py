"""A kernel that several of the things which are compiled have is compiled once.

Ends of a model repeat parts of its layers: other graphs, in which inductor writes some of the same files.
Each is kept here under its name (inductor's digest of text and command) and its own digest, for as long as
a start takes.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

IN_USE = 3600.0  # seconds since something was last used, within which it stays


class Kernels:
    """Libraries in a folder that all processes of a machine share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def provide(self, libraries: Sequence[Path], make: Callable[[Sequence[Path]], None]) -> None:
        """Sees to it that libraries are there.

        What others are at is waited for, when what nobody is at has been made.

        Args:
            make: compiles some of them; one that is missing afterwards it could not.
        """
        others = self._provide(libraries, make, waits=False)
        for library in others:
            self._provide([library], make, waits=True)

    def _provide(
        self, libraries: Sequence[Path], make: Callable[[Sequence[Path]], None], waits: bool
    ) -> list[Path]:
        """Returns what others are at."""
        others = []
        with contextlib.ExitStack() as held:
            missing = []
            for library in libraries:
                if library.exists():
                    continue
                try:
                    self.folder.mkdir(exist_ok=True)
                    lock = FileLock(self.folder / f"{library.name}.lock")
                    held.enter_context(lock.acquire(blocking=waits))
                except Timeout:
                    others.append(library)
                    continue
                except (OSError, NotImplementedError):  # it is compiled twice
                    pass
                if not self._found(library):
                    missing.append(library)
            if missing:
                make(missing)
            for library in filter(Path.exists, missing):
                with contextlib.suppress(OSError):
                    _copy(library, self.folder / f"{library.name}.{digest_of(library)}")
        return others

    def _found(self, library: Path) -> bool:
        for kept in self.folder.glob(f"{library.name}.*"):
            with contextlib.suppress(OSError):
                if kept.suffix == f".{digest_of(kept)}":
                    _copy(kept, library)
                    return True
        return False

    def forget(self) -> None:
        """Removes what no start can still want."""
        for kept in self.folder.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - kept.lstat().st_mtime > IN_USE:
                    kept.unlink()


def digest_of(path: Path) -> str:
    """Of a regular file's bytes.

    Raises:
        OSError: it cannot be read, or is a link or something else.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path) -> None:
    """All at once."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.copyfile(source, part)
    part.replace(target)
