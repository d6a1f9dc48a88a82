"""Checkpoints: whole, or not there.

A save is planned by all ranks together (torch's distributed checkpoint: each part of a tensor is written
by one rank that has it) into a hidden folder beside the one asked for. Each rank writes and syncs its
file; when all have, the first rank adds torch's metadata and the manifest, and renames the folder. So
whatever happens before that moment, nothing is seen of the save, and a checkpoint that was there stays.

Planning and the copy to the host happen inside :meth:`Saver.save`. Everything after may go on in a
thread, which uses no collectives: ranks tell each other by messages that they are done.
"""

import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from stepgraph.errors import CheckpointError, StepgraphError
from stepgraph.runtime import files
from stepgraph.runtime.checkpoints import extras, saved_state, weights_file
from stepgraph.runtime.checkpoints.manifest import NAME, OWN_FILES, FileRecord, Manifest, damaged
from stepgraph.runtime.checkpoints.saved_state import SavedState
from stepgraph.runtime.ranks import Messages, Ranks, largest
from stepgraph.runtime.state import State

log = logging.getLogger("stepgraph")

_METADATA = ".metadata"  # torch's own

Result = TypeVar("Result")


class Saver:
    """Saves and loads one engine's state; at most one save is under way."""

    def __init__(self, state: State) -> None:
        self.state, self.ranks = state, state.ranks
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    # -- saving

    def save(
        self, folder: Path, manifest: Manifest, extra: Mapping[str, Any], *, wait: bool
    ) -> None:
        """Saves everything; without ``wait``, returns when the state is copied to the host.

        A checkpoint that is there is replaced. The manifest has all that the engine knows; extras and files
        are added here.

        Raises:
            CheckpointError: on every rank, whichever failed; also that of an earlier save.
        """
        self.finish()
        folder = Path(os.path.realpath(folder))
        token = _same_token(self.ranks)
        unfinished = files.unfinished_path(folder, token)
        together(self.ranks, lambda: self.ranks.rank or _prepare(folder, unfinished))
        packed, tensors = together(self.ranks, lambda: extras.pack(extra))
        parts, described = extras.spread(packed, self.state)
        manifest = replace(manifest, extra=described)
        content = saved_state.model_state(self.state)
        content |= {"extra": parts, "extra_tensors": tensors}
        if self.state.optimizer is not None:
            content["optimizer"] = saved_state.optimizer_state(self.state)
        planner, writer = _Planner(), FileSystemWriter(unfinished)
        plan = _plan(self.ranks, planner, writer, content)
        if not wait:
            planner.copy_to_host(plan.items)

        def write() -> tuple[list, dict[str, FileRecord]]:
            results = writer.write_data(plan, planner).wait()
            names = sorted({result.storage_data.relative_path for result in results})
            return results, {name: FileRecord.of(unfinished / name) for name in names}

        def complete(written: Sequence[tuple[list, dict[str, FileRecord]]]) -> None:
            writer.finish(planner.metadata, [results for results, _ in written])
            held = {name: record for _, records in written for name, record in records.items()}
            for name in held:
                if not (unfinished / name).exists():
                    raise FileNotFoundError(f"{name} of another rank is not there: is it shared?")
            held[_METADATA] = FileRecord.of(unfinished / _METADATA)
            with files.whole_file(unfinished / NAME) as part:
                part.write_text(replace(manifest, files=held).to_text())
            files.put_folder(unfinished, folder)

        self._start(token, folder, wait, write, complete, unfinished)

    def save_weights(self, path: Path, *, wait: bool) -> None:
        """Writes the model's whole weights to one file, on the first rank.

        Raises:
            CheckpointError: on every rank; also that of an earlier save.
        """
        self.finish()
        path = Path(os.path.realpath(path))
        together(self.ranks, lambda: weights_file.check(path, self.state))
        token = _same_token(self.ranks)
        whole = weights_file.gather(self.state)

        def write() -> None:
            if self.ranks.rank == 0:
                files.remove_unfinished(path)
                weights_file.write(whole, path)

        self._start(token, path, wait, write)

    def _start(
        self,
        token: str,
        path: Path,
        wait: bool,
        write: Callable[[], Any],
        complete: Callable[[Sequence[Any]], None] = lambda written: None,
        unfinished: Path | None = None,
    ) -> None:
        """``write`` on every rank, then ``complete`` on the first; ``unfinished`` goes where any fails."""
        arguments = (Messages(self.ranks, token), path, write, complete, unfinished)
        if wait:
            self._commit(*arguments)
            self.finish()
        else:
            # Not a daemon: a script that ends waits for its last save.
            self._thread = threading.Thread(target=self._commit, args=arguments, name="save")
            self._thread.start()

    def _commit(self, messages: Messages, path: Path, write, complete, unfinished) -> None:
        try:
            written, error = None, None
            try:
                written = write()
            except Exception as caught:
                error = _not_written(caught, path, self.ranks.rank)
            reports = messages.gather("written", (written, error))
            if reports is not None:
                error = next((error for _, error in reports if error is not None), None)
                if error is None:
                    try:
                        complete([written for written, _ in reports])
                    except Exception as caught:
                        error = _not_written(caught, path, self.ranks.rank)
                if error is not None and unfinished is not None:
                    shutil.rmtree(unfinished, ignore_errors=True)
            self._error = messages.tell("outcome", error)
        except Exception as caught:  # the other ranks are gone
            self._error = _not_written(caught, path, self.ranks.rank)
        if self._error is not None and threading.current_thread() is self._thread:
            log.error("%s", self._error)  # it is raised later, but there may be no later

    def finish(self) -> None:
        """Waits for the save under way.

        Raises:
            CheckpointError: it failed, on whichever rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def check(self) -> None:
        """Raises the error of a save under way as soon as all ranks know of it; called by all ranks.

        It must be the same step on every rank: who raises alone leaves the others waiting.
        """
        if self._thread is not None and not largest(self.ranks, self._thread.is_alive())[0]:
            self.finish()

    # -- loading

    def load(self, folder: Path, extra: Mapping[str, Any], *, weights_only: bool) -> Manifest:
        """Loads everything, or the model alone; nothing is changed before all of it has been checked.

        Raises:
            CheckpointError: on every rank: missing, damaged, or of another model or optimizer.
        """
        self.finish()
        folder, ranks = Path(os.path.realpath(folder)), self.ranks
        files.recover_folder(folder)
        manifest = together(ranks, lambda: Manifest.read(folder))
        together(ranks, lambda: manifest.verify(folder, ranks.rank, ranks.shape.world_size))
        saved = together(ranks, lambda: _open(folder))
        with_optimizer = not weights_only and self._has_optimizer(manifest, folder)

        def check() -> dict[str, str]:
            saved_state.check_model(self.state, saved)
            return extras.choose(extra, manifest.extra, self.state, str(folder))

        chosen = together(ranks, check)
        if with_optimizer:
            together(ranks, lambda: saved_state.load_optimizer(self.state, saved))
        together(ranks, lambda: saved_state.load_model(self.state, saved))
        together(ranks, lambda: extras.load(extra, chosen, saved, self.state))
        if left := [name for name in manifest.extra if name not in extra]:
            log.warning("in the checkpoint and not loaded: extra %s", ", ".join(map(repr, left)))
        return manifest

    def load_weights(self, path: Path) -> None:
        """Fills the model from one file; every rank reads it.

        Raises:
            CheckpointError: on every rank: missing, damaged, or of another model.
        """
        self.finish()
        found = together(self.ranks, lambda: weights_file.read(path))
        together(self.ranks, lambda: self.state.load_state_dict(found))

    def _has_optimizer(self, manifest: Manifest, folder: Path) -> bool:
        optimizer = self.state.optimizer
        if optimizer is None:
            if manifest.optimizer is not None:
                log.warning("not loaded, this engine has no optimizer: the saved one's state")
            return False
        if manifest.optimizer is None:
            log.warning("%s was saved without an optimizer: this one starts afresh", folder)
            return False
        if manifest.optimizer not in {cls.__name__ for cls in type(optimizer).__mro__}:
            raise CheckpointError(
                f"the checkpoint {folder} was saved with {manifest.optimizer}, and this engine has "
                f"{type(optimizer).__name__}",
                do=f"use {manifest.optimizer}, or load with weights_only=True",
            )
        return True


class _Planner(DefaultSavePlanner):
    """Plans as torch does; gives out copies once it has made them."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Any] | None = None

    def copy_to_host(self, items: Sequence[WriteItem]) -> None:
        """Copies what this rank writes, so that the next step may change it."""
        copies = {}
        for item in items:
            data = super().resolve_data(item)
            if isinstance(data, torch.Tensor):
                data = data.detach().clone() if data.is_cpu else data.detach().cpu()
            copies[item.index] = data
        self._copies, self.state_dict = copies, {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """What to write; a copy is given away, and its memory with it."""
        if self._copies is None:
            return super().resolve_data(write_item)
        return self._copies.pop(write_item.index)


def _plan(
    ranks: Ranks, planner: _Planner, writer: FileSystemWriter, content: dict[str, Any]
) -> SavePlan:
    """What this rank writes; the first rank's planner has torch's metadata then."""
    first, several = ranks.rank == 0, ranks.shape.world_size > 1

    def local() -> SavePlan:
        planner.set_up_planner(content, writer.storage_meta(), first)
        writer.set_up_storage_writer(first, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans: list[Any] | None = [together(ranks, local)]
    if several:
        mine, plans = plans[0], [None] * ranks.shape.world_size if first else None
        dist.gather_object(mine, plans)

    def everybody() -> list[SavePlan] | None:
        return plans and writer.prepare_global_plan(planner.create_global_plan(plans)[0])

    plans = together(ranks, everybody)
    if several:
        received: list[Any] = [None]
        dist.scatter_object_list(received, plans)
        plans = received
    assert plans is not None
    return planner.finish_plan(plans[0])


def together(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Runs ``work`` on every rank; where it fails on one, all raise the first such rank's error."""
    result, error, own = None, None, None
    try:
        result = work()
    except Exception as caught:
        own = error = caught
        if not isinstance(caught, StepgraphError):
            what = f"rank {ranks.rank} failed: {type(caught).__name__}: {caught}"
            error = CheckpointError(what)
    errors: list[Any] = [None] * ranks.shape.world_size
    if largest(ranks, error is not None)[0] and len(errors) > 1:
        dist.all_gather_object(errors, error)
    if own is not None:
        raise own
    if (first := next((e for e in errors if e is not None), None)) is not None:
        raise first
    return result  # type: ignore[return-value]


def _same_token(ranks: Ranks) -> str:
    """A new number, the same on every rank and in no other save, as text."""
    return f"{largest(ranks, uuid.uuid4().int >> 72)[0]:014x}"


def _prepare(folder: Path, unfinished: Path) -> None:
    """Checks that the checkpoint may be put there, and makes the hidden folder beside it."""
    try:
        files.recover_folder(folder)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file: a checkpoint is a folder",
                do="name a folder, or a .safetensors, .pt or .pth file for the weights alone",
            )
        found = sorted(os.listdir(folder)) if folder.exists() else []
        others = [name for name in found if not OWN_FILES.fullmatch(name)]
        if others or (found and NAME not in found):
            raise CheckpointError(
                f"{folder} is there and is not a checkpoint of stepgraph alone; nothing was saved",
                why=f"it holds {', '.join((others or found)[:5])}, which a save would remove",
                do="name a new folder",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.remove_unfinished(folder)
        unfinished.mkdir()
    except OSError as error:
        raise _not_written(error, folder, 0) from error


def _open(folder: Path) -> SavedState:
    try:
        return SavedState(folder)
    except Exception as error:  # a pickle of another torch may fail in any way
        raise damaged(folder / _METADATA, f"{type(error).__name__}: {error}") from error


def _not_written(error: Exception, path: Path, rank: int) -> CheckpointError:
    named = getattr(error, "filename", None)
    root: BaseException = error
    while not isinstance(root, OSError) and root.__context__ is not None:
        root = root.__context__  # torch's writer, told of an error, raises its own
    reason = (root.strerror if isinstance(root, OSError) else "") or str(error)
    return CheckpointError(
        f"rank {rank} could not write the checkpoint {path}: {reason or type(error).__name__}",
        where=None if named is None else str(named),
        do="free space or choose another place, and save again; what was complete is as it was",
    )
