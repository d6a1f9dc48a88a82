"""A manifest is what was written, or a CheckpointError that says why not."""

import json

import pytest

from stepgraph.errors import CheckpointError
from stepgraph.runtime.checkpoints import manifest
from stepgraph.runtime.checkpoints.manifest import NAME, FileRecord, Manifest

WRITTEN = Manifest(3, 0, "dp=2", "zero3", "adamw", {}, {".metadata": FileRecord(12, 34)})


def test_what_was_written_is_read(tmp_path):
    (tmp_path / NAME).write_text(WRITTEN.to_text())
    assert Manifest.read(tmp_path) == WRITTEN


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"more": 1}, "unknown field `more`"),
        ({"step": -1}, "step: Expected a whole number >= 0, not -1"),
        ({"files": {"a": {"bytes": "12", "crc32": 1}}}, "files.a.bytes: Expected a whole number"),
        ({"mesh": None}, "mesh: Expected a text"),
    ],
)
def test_a_checksum_that_fits_does_not_make_a_manifest(tmp_path, change, why):
    content = json.loads(WRITTEN.to_text()) | change
    del content["checksum"]
    signed = {"checksum": manifest._checksum(content), **content}
    (tmp_path / NAME).write_text(json.dumps(signed, indent=1) + "\n")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged") as caught:
        Manifest.read(tmp_path)
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"format": 1}'])
def test_what_is_no_manifest_is_damaged(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        Manifest.read(tmp_path)
