"""A server that the ranks of ``stepgraph train`` are forked from.

It begins to import what ranks need (torch's compiler, the model's library: seconds) before this process
imports anything large, so the two do it side by side, and a rank imports nothing again.
"""

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

_OF_RANKS = ("stepgraph.cli.training", "stepgraph.torch_internals.of_first_steps")
_OF_MODELS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def asks_for_ranks(arguments: Sequence[str]) -> bool:
    """Whether the arguments of ``train`` have this process start ranks."""
    asked = re.findall(r"--(?:ranks|mesh)[ =](\S*)", " ".join(arguments))
    counts = [int(number) for value in asked for number in re.findall(r"\d+", value)]
    return any(count > 1 for count in counts) and "RANK" not in os.environ


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the machine has a GPU's driver: once an import has touched it, no fork can use it."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def start_server(arguments: Sequence[str]) -> None:
    """Starts it, unless the platform or this program has ranks begin in another way."""
    method = multiprocessing.get_start_method(allow_none=True)
    if method is not None or not sys.platform.startswith("linux") or has_accelerator():
        return
    multiprocessing.set_start_method("forkserver")
    own_model = any(re.fullmatch(r"(--model=)?[\w.]+:[\w.]+", argument) for argument in arguments)
    multiprocessing.set_forkserver_preload([*_OF_RANKS, *(() if own_model else _OF_MODELS)])
    forkserver.ensure_running()
