"""What an Engine saves and loads: state dicts and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stepgraph.api.plan import Plan
from stepgraph.errors import UsageError
from stepgraph.runtime.checkpoints.checkpoint import Saver
from stepgraph.runtime.checkpoints.extras import check_extras
from stepgraph.runtime.checkpoints.manifest import Manifest
from stepgraph.runtime.checkpoints.weights_file import names_weights_file
from stepgraph.runtime.ranks import Ranks
from stepgraph.runtime.recompiles import Stats
from stepgraph.runtime.state import State

log = logging.getLogger("stepgraph")


class SavesAndLoads:
    """The part of an Engine that is about its state."""

    plan: Plan
    stats: Stats
    _saver: Saver
    _state: State
    _seed: int
    _ranks: Ranks
    _optimizer: torch.optim.Optimizer | None

    @property
    def seed(self) -> int:
        """The seed of random operations; ``load`` takes over the one that was saved."""
        return self._seed

    def state_dict(self) -> dict[str, Any]:
        """The plain module's keys, tied names and buffers included; DTensor values."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fills the model from whole or distributed tensors.

        Raises:
            CheckpointError: keys or shapes that do not fit.
        """
        self._state.load_state_dict(state_dict)

    def save(
        self, directory: str | Path, extra: Mapping[str, Any] | None = None, wait: bool = True
    ) -> None:
        """Saves a checkpoint: model, optimizer, step and seed, and the extras; called by every rank.

        It appears under its name when it is complete, in one step, and replaces one that is there.
        Plain PyTorch reads it with ``torch.distributed.checkpoint`` (``model`` and ``optimizer`` under
        the model's own names).

        Args:
            directory: a folder that all ranks reach. A name that ends in ``.safetensors``, ``.pt`` or
                ``.pth`` means one file with the whole weights alone, for any other program.
            extra: objects with ``state_dict`` and ``load_state_dict`` (a data loader, a scheduler), by
                name.
            wait: False returns when the state is copied to the host's memory, and goes on in a thread;
                the next ``save``, ``load`` or ``wait_for_save`` waits for it. If it fails, they or the
                next ``step`` raise its error.

        Raises:
            CheckpointError: it could not be written, on whichever rank: raised by all. What was
                complete before is as it was.
            UsageError: an extra without ``state_dict``.
        """
        path, extra = Path(directory), check_extras(extra)
        if _is_one_file(path, extra):
            self._saver.save_weights(path, wait=wait)
            return
        optimizer = None if self._optimizer is None else type(self._optimizer).__name__
        steps, mesh = self.stats.steps, str(self._ranks.shape)
        manifest = Manifest(steps, self._seed, mesh, self.plan.placement, optimizer)
        self._saver.save(path, manifest, extra, wait=wait)

    def load(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        weights_only: bool = False,
    ) -> None:
        """Loads what ``save`` wrote, from any mesh and plan, before or after the first step.

        Everything is checked before anything is changed. The saved step and seed are taken, so that
        the run goes on with the same random masks. Optimizer states go by the parameters' names; the
        numbers of parameter groups (learning rates) are those that were saved.

        Args:
            directory: a checkpoint's folder, or a file of weights.
            extra: objects to give their state back, by the names they were saved under.
            weights_only: the model alone.

        Raises:
            CheckpointError: there is none, a file of it is damaged (and is named), or it does not fit
                the model, the optimizer or the extras.
        """
        path, extra = Path(directory), check_extras(extra)
        if _is_one_file(path, extra):
            self._saver.load_weights(path)
            return
        manifest = self._saver.load(path, extra, weights_only=weights_only)
        if weights_only:
            return
        if manifest.seed != self._seed:
            log.warning(
                "seed %d, of the checkpoint, instead of %d: the run that was saved goes on",
                manifest.seed, self._seed,
            )  # fmt: skip
        self.stats.steps, self._seed = manifest.step, manifest.seed

    def wait_for_save(self) -> None:
        """Waits for the save under way, if there is one; called by every rank.

        Raises:
            CheckpointError: it failed.
        """
        self._saver.finish()


def _is_one_file(path: Path, extra: Mapping[str, Any]) -> bool:
    """Whether a path means one file of weights, which holds no extras."""
    if extra and names_weights_file(path):
        raise UsageError(
            f"{path} is one file of weights, which holds no extras", do="name a folder"
        )
    return names_weights_file(path)
