"""Bytes of text as training data: any file or folder is a data set, a byte is a token.

Batches hold no position: the rows of step ``s`` follow from the text, the seed and ``s`` alone, so a
run resumes from a step number. The rows of the *global* batch do not depend on how many ranks share
them.
"""

import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stepgraph.errors import UsageError

log = logging.getLogger("stepgraph")

VOCABULARY = 256
MAX_BYTES = 64 * 2**20
# fmt: off
SUFFIXES = frozenset([
    ".py", ".txt", ".md", ".rst", ".tex", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go",
    ".java", ".js", ".ts", ".sh", ".toml", ".yaml", ".yml",
])
# fmt: on
# Not the folder's own text: what was installed or generated there.
SKIPPED = frozenset(["site-packages", "dist-packages", "node_modules", "__pycache__"])


def text_files(path: str | Path) -> list[Path]:
    """The file itself, or the regular files with the suffix of a text below a folder, sorted.

    Hidden folders and installed packages below the folder are passed over.

    Raises:
        UsageError: there is nothing there, or no text in the folder.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.exists():
        raise UsageError(
            f"there is no text at {str(path)!r}", do="give a file or a folder to --text"
        )
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = [name for name in inner if name not in SKIPPED and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if file.suffix in SUFFIXES and file.is_file() and not file.is_symlink():
                found.append(file)
    if not found:
        raise UsageError(
            f"there is no text file below {str(path)!r}",
            why=f"in a folder, files are read by suffix: {' '.join(sorted(SUFFIXES))}",
            do="give a file to --text",
        )
    return sorted(found)


def count_bytes(path: str | Path) -> int:
    """How many bytes :func:`read_text` would give; nothing is read."""
    return min(MAX_BYTES, sum(file.stat().st_size for file in text_files(path)))


def read_text(path: str | Path) -> torch.Tensor:
    """The text's bytes: 1-dim uint8, at most :data:`MAX_BYTES` of it.

    Raises:
        UsageError: missing, empty or unreadable.
    """
    data = bytearray()
    for file in text_files(path):
        try:
            with file.open("rb") as stream:
                data += stream.read(MAX_BYTES - len(data))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        if len(data) >= MAX_BYTES:
            break
    if not data:
        raise UsageError(f"the text at {str(path)!r} is empty")
    return torch.frombuffer(data, dtype=torch.uint8)


@dataclass(frozen=True)
class BatchShape:
    """The global batch: ``rows`` rows of ``seq`` bytes on each of ``ranks``."""

    rows: int
    seq: int
    ranks: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one global batch."""
        return self.rows * self.seq * self.ranks

    def check_fits(self, available: int, path: str | Path) -> None:
        """Raises UsageError where a text is shorter than one batch."""
        if available == 0:
            raise UsageError(f"the text at {str(path)!r} is empty")
        if available < self.bytes:
            raise UsageError(
                f"the text at {str(path)!r} is shorter than one batch: {self.bytes} bytes are "
                f"needed, {available} given",
                why=f"{self.ranks} ranks x {self.rows} rows x {self.seq} bytes",
                do="give more text, or lower --batch-per-rank or --seq",
            )


@dataclass(frozen=True)
class TextBatches:
    """Batches of windows into a text, one rank's part of them.

    Args:
        data: 1-dim uint8, at least one batch long.
        shape: of the batch.
        seed: of the windows' positions.
        rank: among ``shape.ranks``, the ranks that hold different rows.
    """

    data: torch.Tensor
    shape: BatchShape
    seed: int
    rank: int = 0

    def offsets(self, step: int) -> list[int]:
        """Where the rows of a step's global batch begin in the text."""
        # Seeding by a string goes through SHA-512: neighbouring steps are unrelated.
        generator = random.Random(f"{self.seed}/{step}")
        last = len(self.data) - self.shape.seq
        return [generator.randint(0, last) for _ in range(self.shape.rows * self.shape.ranks)]

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This rank's part of a step's batch: ``input_ids`` and ``labels``, int64 [rows, seq]."""
        first = self.rank * self.shape.rows
        mine = self.offsets(step)[first : first + self.shape.rows]
        ids = torch.stack([self.data[offset : offset + self.shape.seq] for offset in mine]).long()
        return {"input_ids": ids, "labels": ids.clone()}

    def state_dict(self) -> dict[str, int]:
        """What the rows of a step follow from, besides its number; the same on every rank."""
        rows = self.shape.rows * self.shape.ranks
        return {"text bytes": len(self.data), "rows": rows, "row bytes": self.shape.seq}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Says where a resumed run goes on with other rows than the one that was saved."""
        mine = self.state_dict()
        changed = [f"{k} {state.get(k)} -> {mine[k]}" for k in mine if state.get(k) != mine[k]]
        if changed:
            log.warning(
                "the run goes on with other data than it began with: %s", "; ".join(changed)
            )


@torch.no_grad()
def generate(
    model: nn.Module,
    count: int,
    *,
    prompt: bytes = b"\n",
    window: int = 128,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continues a prompt by ``count`` bytes.

    Args:
        model: plain, in any mode; called with ``input_ids`` of at most ``window`` bytes.
        temperature: 0 takes the likeliest byte each time.

    Returns:
        the new bytes as text; what is not UTF-8 is shown as a replacement character.
    """
    model.eval()
    device = next(model.parameters()).device
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        result = model(input_ids=torch.tensor([ids[-window:]], device=device))
        logits = result if isinstance(result, torch.Tensor) else result.logits
        scores = logits[0, -1, :VOCABULARY].float().cpu()
        if temperature == 0:
            ids.append(int(scores.argmax()))
        else:
            weights = torch.softmax(scores / temperature, 0)
            ids.append(int(torch.multinomial(weights, 1, generator=generator)))
    return bytes(ids[len(prompt) :]).decode(errors="replace")
