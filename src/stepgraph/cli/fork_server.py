"""A server that the processes of a command are forked from: the ranks of ``train``, who plans for ``plan``.

It begins to import what they need (torch's compiler, the model's library: seconds) before this process
imports anything large, so the two do it side by side, and none of them imports it again.
"""

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

_OF_RANKS = ("stepgraph.cli.training", "stepgraph.torch_internals.of_first_steps")
_OF_PLANS = ("stepgraph.cli.plans.processes", "stepgraph.placement.solver.automatic")
_OF_MODELS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def modules_for(arguments: Sequence[str]) -> list[str]:
    """What the processes of a command line need; nothing where it surely starts none."""
    command, *options = arguments
    if command == "train" and _asks_for_ranks(options):
        found = _OF_RANKS
    elif command == "plan" and _asks_for_meshes(options) and cores() > 1:
        found = _OF_PLANS
    else:
        return []
    own_model = any(re.fullmatch(r"(--model=)?[\w.]+:[\w.]+", option) for option in options)
    return [*found, *(() if own_model else _OF_MODELS)]


def _asks_for_ranks(options: Sequence[str]) -> bool:
    """Whether ``train`` has this process start ranks."""
    asked = re.findall(r"--(?:ranks|mesh)[ =](\S*)", " ".join(options))
    counts = [int(number) for value in asked for number in re.findall(r"\d+", value)]
    return any(count > 1 for count in counts) and "RANK" not in os.environ


def _asks_for_meshes(options: Sequence[str]) -> bool:
    """Whether ``plan`` may divide its work: meshes have steps of their own."""
    meshes = re.findall(r"--mesh[ =](\S+)", " ".join(options))
    return len(meshes) > 1 or "auto" in meshes


def cores() -> int:
    """Those that this process may use, where the system says so."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the machine has a GPU's driver: once an import has touched it, no fork can use it."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def start_server(arguments: Sequence[str]) -> None:
    """Starts it for a command line that wants one.

    Not where the platform or this program has processes begin in another way, nor where a program that is
    more than this command calls it.
    """
    modules = modules_for(arguments) if list(arguments) == sys.argv[1:] else []
    chosen = multiprocessing.get_start_method(allow_none=True)
    if not modules or chosen or not sys.platform.startswith("linux") or has_accelerator():
        return
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(modules)
    forkserver.ensure_running()


def has_server() -> bool:
    """Whether this program has a server to fork processes from; else they begin anew."""
    return multiprocessing.get_start_method(allow_none=True) == "forkserver"
