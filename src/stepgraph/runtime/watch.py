"""Ranks that do not do the same end, and say what differs.

Every rank must make the same calls, in the same order, and run the same programs: otherwise one waits for
the other for ever, or takes for its own what the other meant for something else. Nothing is exchanged for
that in a step: each rank keeps a list of its calls, and a thread beside it compares the list with the first
rank's, through the store by which the ranks found each other, when there is something new or a call takes
long. A rank that is late (it loads, saves, compiles) has made fewer calls, and contradicts nobody.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
import zlib
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from stepgraph import torch_internals
from stepgraph.errors import RanksDifferError
from stepgraph.planning.fingerprint import fingerprint_of
from stepgraph.planning.plan import Plan
from stepgraph.runtime.progress import PATIENCE, busy, say
from stepgraph.runtime.ranks import Ranks, are_real
from stepgraph.runtime.record import Record

TICK = 1.0  # seconds between two looks
LONG = 2  # looks that find the same call going on, before it is looked at again and again
EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_WHY = (
    "every rank must make the same calls in the same order, with batches of the same shapes and types, of "
    "one model, whose Python takes the same branches on all of them"
)
_DO = (
    "decide what differs on the first rank and send it to the others (torch.distributed.broadcast), or "
    "bring equal batches (drop_last=True)"
)


class Watch:
    """The calls of one rank, and the thread that compares them with the first rank's.

    Attributes:
        made: engines that were agreed on.
        record: takes the calls of entry points, of which every rank makes the same.
        within: to be entered while one of them goes on.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore("stepgraph/watch", torch_internals.rendezvous_store())
        self.made = self._said = 0
        self.record, self.within = Record(), Within()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stepgraph watch", daemon=True)
        self._thread.start()

    # -- the main thread

    def runs(self, digest: int) -> None:
        """A program is run, in the call that is made."""
        self.record.tell(digest)

    def running(self, digest: int) -> AbstractContextManager:
        """One graph of many is run: in the call that is made, or after it."""
        self.runs(digest)
        return self.within

    def changes_to(self, digest: int) -> None:
        """Another program is run than in the calls before: on every rank, or on none.

        Waits for the others, however late; called before it is run.

        Raises:
            RanksDifferError: some rank goes on with what it had.
        """
        number, _, calls = self.record.now()
        asked = [0] if self.rank else range(1, self.size)
        self._store.set(f"changes/{number}/{self.rank}", str(digest))
        for rank in asked:
            key = f"changes/{number}/{rank}"
            while not self._store.check([key]):
                time.sleep(0.05)
                theirs, runs, _ = self._published(rank)
                further = theirs > number or (theirs == number and runs)
                if further and not self._store.check(
                    [key]
                ):  # it may have come, and gone on, meanwhile
                    raise self.differ(
                        f"call {number}, {calls[number][1]}, is another one than before on rank "
                        f"{self.rank} alone, and not on rank {rank}"
                    )
            if self._store.get(key).decode() != str(digest):
                raise self.differ(f"call {number} runs other programs on rank {rank} than here")

    def word(self) -> int:
        """20 bits that say what ran since the last call began."""
        self.record.add_up()
        return zlib.crc32(repr(self.record.runs).encode()) & 0xFFFFF

    def agree(self, shown: dict[str, Any]) -> None:
        """Every rank was given the same; called by all, before they exchange anything else.

        Raises:
            RanksDifferError: this rank was given something else than the first.
        """
        self.made += 1
        key = f"made/{self.made}"
        if self.rank == 0:
            self._store.set(key, json.dumps(shown))
            return
        while not self._store.check([key]):
            time.sleep(0.01)
        first = json.loads(self._store.get(key))
        mine = json.loads(json.dumps(shown))
        apart = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
        if not apart:
            return
        lines = [
            f"{n} is {first.get(n)} on rank 0, {mine.get(n)} on rank {self.rank}" for n in apart
        ]
        raise self.differ(f"they were not given the same: {'; '.join(lines[:3])}")

    def differ(self, where: str) -> RanksDifferError:
        """Tells all ranks that they end, and why."""
        error = RanksDifferError(f"the ranks do not do the same: {where}", why=_WHY, do=_DO)
        self._store.set("end", f"stepgraph: {error}")
        return error

    # -- the thread

    def stop(self) -> None:
        """Ends the thread; before the process group goes."""
        self._stop.set()
        self._thread.join(2 * TICK)

    def _look(self) -> None:
        try:
            self._look_on()
        finally:
            self.record.close()

    def _look_on(self) -> None:
        seen, looks = 0, 0
        while not self._stop.wait(TICK):
            self.record.add_up()
            same = self.record.number == seen
            looks = looks + 1 if self.within.depth and same else 0
            if same and looks < LONG:
                continue
            seen = self.record.number
            try:
                self._compare()
                if self.rank == 0 and looks * TICK >= PATIENCE and not busy():
                    self._say_who_is_late()
            except (RuntimeError, OSError):  # the store is gone, and the run with it
                return

    def _compare(self) -> None:
        """The first rank's calls against this one's, as far as both have come."""
        if self._store.check(["end"]):
            self._end(self._store.get("end").decode())
        number, runs, calls = self.record.now()
        self._store.set(f"calls/{self.rank}", json.dumps([number, runs, list(calls.items())]))
        if self.rank == 0:
            return
        their_number, their_runs, theirs = self._published(0)
        for n, (chain, shown) in theirs:
            if n in calls and calls[n][0] != chain:
                self._end(self._apart(n, shown, calls[n][1]))
        same = min(len(runs), len(their_runs))
        if number == their_number and runs[:same] != their_runs[:same]:
            shown = calls[number][1] if calls else "what came before the first call"
            self._end(self._apart(number, f"{shown}, which runs other graphs there,", shown))

    def _say_who_is_late(self) -> None:
        """The ranks that have not come to this call; once a call."""
        number, _, calls = self.record.now()
        late = [rank for rank in range(1, self.size) if self._published(rank)[0] < number]
        if late and number != self._said:
            self._said = number
            say(f"waiting for ranks {late} to come to call {number}, {calls[number][1]} ...")

    def _published(self, rank: int) -> tuple[int, list[int], list]:
        """What a rank has told of its calls: the number of the last, what ran in it, and all."""
        key = f"calls/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else (0, [], [])

    def _apart(self, number: int, first: str, mine: str) -> str:
        if first == mine:
            first = mine = f"{mine}, after another program or branch"
        error = self.differ(f"call {number} is {first} on rank 0, and {mine} on rank {self.rank}")
        return f"stepgraph: {error}"

    @staticmethod
    def _end(message: str) -> None:
        """Ends this process: nothing can be raised in a thread that waits inside a collective."""
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


class Within(AbstractContextManager):
    """A call goes on, or a part of one."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_over(ranks: Ranks, model: nn.Module, plan: Plan) -> Watch | None:
    """The one watch of this process and its default process group, which agrees to a model and its plan.

    None where nobody could differ, or where the mesh leaves some ranks out, which may do something else.

    Raises:
        RanksDifferError: this rank was given something else than the first.
    """
    if ranks.shape.world_size == 1 or not are_real():
        return None
    if ranks.shape.world_size != dist.get_world_size():
        return None
    group = dist.group.WORLD
    if group not in _watches:
        _watches[group] = watch = Watch(dist.get_rank(), dist.get_world_size())
        atexit.register(watch.stop)
    given = fingerprint_of(model)
    _watches[group].agree({**given.parameters, **given.buffers, "the plan": repr(plan.request)})
    return _watches[group]
