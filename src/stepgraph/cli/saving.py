"""What ``stepgraph train --checkpoint`` does: a folder of saves, and leaving when told to."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.api.engine import Engine
from stepgraph.errors import CheckpointError, UsageError
from stepgraph.runtime.checkpoints.manifest import NAME
from stepgraph.runtime.ranks import from_first_rank

KEEP = 2  # complete saves that stay
_SAVE = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.saving-\w+")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class SaveFolder:
    """A folder of one run's saves, ``step-00000050`` and so on; ``every``: steps from one to the next."""

    path: Path
    every: int

    def check(self, resume: bool) -> None:
        """Raises UsageError where the folder cannot be this run's."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--checkpoint {str(self.path)!r} is a file", do="name a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise UsageError(
                f"--checkpoint {str(self.path)!r} cannot be written: {error.strerror}"
            ) from error
        if not resume and (saves := self.saves()):
            raise UsageError(
                f"--checkpoint {str(self.path)!r} holds the saves of a run up to step {max(saves)}",
                do="add --resume to go on from there, or name another folder",
            )

    def of(self, step: int) -> Path:
        """Where the save of a step goes."""
        return self.path / f"step-{step:08d}"

    def saves(self) -> dict[int, Path]:
        """The complete saves by step, oldest first: those that have a manifest."""
        found: dict[int, Path] = {}
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if (named := _SAVE.fullmatch(entry.name)) and (entry / NAME).exists():
                found[int(named[1])] = entry
        return dict(sorted(found.items()))

    def prune(self) -> None:
        """Removes all but the last complete saves, and what killed saves left.

        No save may be under way.
        """
        for step in list(self.saves())[:-KEEP]:
            # Without its manifest it is no save any more, should this be the last that happens.
            (self.of(step) / NAME).unlink(missing_ok=True)
        for entry in self.path.iterdir():
            dead = _SAVE.fullmatch(entry.name) and not (entry / NAME).exists()
            if dead or _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def resume(self, engine: Engine, extra: dict[str, Any]) -> Path | None:
        """Loads the last complete save; None where there is none. Called by every rank.

        Raises:
            CheckpointError: it is damaged or does not fit; says which earlier one is complete.
        """
        saves = from_first_rank(self.saves())
        if not saves:
            return None
        last, *earlier = reversed(saves)
        try:
            engine.load(saves[last], extra=extra)
        except CheckpointError as error:
            if error.do is None or "earlier checkpoint" not in error.do:
                raise
            other = f"step {earlier[0]}, which is complete" if earlier else "the beginning"
            raise CheckpointError(
                error.what,
                where=error.where,
                why=error.why,
                do=f"remove the folder {saves[last]}; --resume then goes on from {other}",
            ) from error
        return saves[last]


class Saves:
    """The saves of a run while it runs; called by every rank at the same steps."""

    def __init__(self, folder: SaveFolder, engine: Engine, extra: dict[str, Any]) -> None:
        self.folder, self.engine, self.extra = folder, engine, extra
        self.last = engine.stats.steps

    def after_step(self) -> None:
        """Starts a save where one is due; training goes on meanwhile."""
        if self.engine.stats.steps % self.folder.every == 0:
            self._save(wait=False)

    def finish(self) -> Path | None:
        """Saves where the run is now, if that has not been; waits. None where no step was ever taken."""
        if self.last != self.engine.stats.steps:
            self._save(wait=True)
        self._settle()
        return self.folder.of(self.last) if self.last else None

    def _save(self, wait: bool) -> None:
        self._settle()
        self.last = self.engine.stats.steps
        self.engine.save(self.folder.of(self.last), extra=self.extra, wait=wait)

    def _settle(self) -> None:
        """Ends the save under way, then removes the oldest: never before the newer one is complete."""
        self.engine.wait_for_save()
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.folder.prune()


class StopSignals:
    """While it is entered, SIGINT and SIGTERM ask for a stop instead of ending the process.

    In a process that is alone, the second one does what it did before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._receive) for n in STOP_SIGNALS}
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if not dist.is_initialized():  # ranks get it again from whoever started them
            self.__exit__()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def agreed(self) -> int:
        """The signal that any rank has received, the same answer on every rank; 0 for none."""
        if not dist.is_initialized():
            return self._received
        received = torch.tensor(self._received, device=self._device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return int(received.item())
