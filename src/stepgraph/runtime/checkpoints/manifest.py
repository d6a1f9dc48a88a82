"""The manifest of a checkpoint: what it holds, and how one knows that all of it is there.

It is written last and has a checksum of its own, so a folder with a readable manifest is a checkpoint
whose every file was written.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import field

from stepgraph.errors import CheckpointError
from stepgraph.planning import reading
from stepgraph.runtime.files import checksum

NAME = "stepgraph.json"
FORMAT = 1
# What a checkpoint's folder holds: torch's own files, and the manifest.
OWN_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|" + re.escape(NAME))


class FileRecord(reading.Strict, frozen=True):
    """What a file must be: its size and the CRC-32 of its bytes."""

    bytes: reading.Count
    crc32: reading.Count

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """What a file is now."""
        return cls(path.stat().st_size, checksum(path))


class Manifest(reading.Strict, frozen=True):
    """What a checkpoint holds.

    Args:
        step: optimizer steps taken.
        seed: of the run's random operations.
        mesh, plan: of the run that saved; for the reader, nothing depends on them.
        optimizer: the class's name; None where there was no optimizer.
        extra: how each extra is kept: ``{"of": "data-parallel ranks", "parts": 2}``.
        files: every other file of the folder.
    """

    step: reading.Count
    seed: int
    mesh: str
    plan: str
    optimizer: str | None
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    torch: str = str(torch.__version__)
    format: int = FORMAT

    def to_text(self) -> str:
        """The manifest file's text."""
        content = msgspec.to_builtins(self)
        return json.dumps({"checksum": _checksum(content), **content}, indent=1) + "\n"

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            CheckpointError: no checkpoint, not one of stepgraph's, damaged, or of a later format.
        """
        path = folder / NAME
        if not folder.exists():
            raise CheckpointError(f"there is no checkpoint at {str(folder)!r}")
        if not folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} is a file, not a checkpoint's folder",
                do="weights alone are read from .safetensors, .pt and .pth files",
            )
        try:
            text = reading.read_bytes(path)
            content = reading.parse_json(text)
        except FileNotFoundError:
            if not (folder / ".metadata").exists():
                what = f"{folder} is not a checkpoint: it has no {NAME}"
                raise CheckpointError(what) from None
            raise CheckpointError(
                f"{folder} has no {NAME}",
                why="it was written by torch.distributed.checkpoint alone, or by another program",
                do="fill the model with torch.distributed.checkpoint.load(engine.state_dict(), "
                "checkpoint_id=...), under that checkpoint's own keys",
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except reading.MalformedError as error:
            raise damaged(path, f"it is not a manifest: {error.problem}") from error
        if not isinstance(content, dict):
            raise damaged(path, "it is not a manifest")
        version = content.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{path} has format {version}; this version of stepgraph reads up to {FORMAT}",
                do="load it with the version that wrote it, or a later one",
            )
        if content.pop("checksum", None) != _checksum(content):
            raise damaged(path, "its checksum does not match")
        try:
            manifest = reading.convert(content, Manifest)
        except reading.MalformedError as error:
            raise damaged(path, f"{error.where}: {error.problem}") from error
        if manifest.to_text().encode() != text:
            raise damaged(path, "it is not what was written")
        return manifest

    def verify(self, folder: Path, part: int = 0, parts: int = 1) -> None:
        """Checks that every file is what was written; the bytes of every ``parts``-th file only.

        Raises:
            CheckpointError: names the first file that is missing, short or changed.
        """
        for index, (name, wanted) in enumerate(sorted(self.files.items())):
            path = folder / name
            try:
                size = path.stat().st_size
                if size != wanted.bytes:
                    raise damaged(path, f"it has {size} bytes, {wanted.bytes} were written")
                if index % parts == part and checksum(path) != wanted.crc32:
                    raise damaged(path, "its checksum does not match")
            except FileNotFoundError:
                raise damaged(path, "it is missing") from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def damaged(path: Path, why: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(
        f"the checkpoint is damaged: {path}",
        why=why,
        do="nothing was loaded; load an earlier checkpoint",
    )


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
