"""Files and folders that appear whole or not at all, and stay when the machine loses power."""

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 22
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


def checksum(path: Path) -> int:
    """The CRC-32 of a file's bytes: any burst of up to 32 flipped bits changes it."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            crc = zlib.crc32(block, crc)
    return crc


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; what stands there at the end becomes ``path`` at once."""
    unfinished = unfinished_path(path, uuid.uuid4().hex[:12])
    try:
        yield unfinished
        with unfinished.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def unfinished_path(path: Path, token: str) -> Path:
    """A hidden name beside ``path`` for what will become ``path``."""
    return path.with_name(f".{path.name}.saving-{token}")


def remove_unfinished(path: Path) -> None:
    """Removes what saves of ``path`` left that were killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.saving-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def put_folder(new: Path, path: Path) -> None:
    """Makes the folder ``new`` appear as ``path``; a folder that was there is removed afterwards.

    On Linux the two are exchanged in one step. Elsewhere the old one is renamed first: a process that
    is killed right then leaves it under another name, from which :func:`recover_folder` takes it back.
    """
    if not path.exists():
        os.rename(new, path)
    elif not _exchange(new, path):
        old = _replaced(path)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(new, path)
        new = old
    sync_folder(path.parent)
    if new.exists():
        shutil.rmtree(new, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Takes back a folder that was being replaced, if what was to replace it did not come."""
    old = _replaced(path)
    if not path.exists() and old.exists():
        with contextlib.suppress(OSError):  # another rank may have been faster
            os.rename(old, path)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if function(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(b))
