"""A model's weights in one file that needs no stepgraph: a plain ``state_dict``, or safetensors."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stepgraph.errors import CheckpointError, UsageError
from stepgraph.runtime.files import whole_file
from stepgraph.runtime.state import State
from stepgraph.torch_internals import host_device

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pt", ".pth")


def names_weights_file(path: Path) -> bool:
    """Whether a path means one file of weights, not a checkpoint's folder."""
    return path.suffix in SUFFIXES and not path.is_dir()


def check(path: Path, state: State) -> None:
    """Refuses what cannot be written, before anything is gathered.

    Raises:
        UsageError: safetensors is not installed, or cannot hold this model's state.
        CheckpointError: no such folder.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(path.parent)!r}", do="create it")
    if path.suffix == SAFETENSORS:
        _safetensors()
        odd = [name for name, v in state.state_dict().items() if not isinstance(v, torch.Tensor)]
        if odd:
            raise UsageError(
                f"safetensors holds tensors only; {odd[0]!r} is none", do="save to a .pt file"
            )


def gather(state: State) -> dict[str, Any]:
    """The whole state dict in the host's memory of the first rank; empty on the others."""
    whole: dict[str, Any] = {}
    for name, value in state.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()  # every rank takes part
            # Its own memory: the next step writes in place, and tied names must not share in the file.
            value = value.detach().clone() if value.is_cpu else value.detach().cpu()
        if state.ranks.rank == 0:
            whole[name] = value.contiguous() if isinstance(value, torch.Tensor) else value
    return whole


def write(whole: dict[str, Any], path: Path) -> None:
    """Writes the file; it appears when it is complete."""
    with whole_file(path) as unfinished:
        if path.suffix == SAFETENSORS:
            _safetensors().save_file(whole, unfinished, metadata={"format": "pt"})
        else:
            with unfinished.open("wb") as stream:  # to a path, torch hides why it failed
                torch.save(whole, stream)


def read(path: Path) -> dict[str, Any]:
    """The state dict in a file, on the host.

    Raises:
        CheckpointError: names the file: missing, damaged, or something else.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        if path.suffix == SAFETENSORS:
            found = _safetensors().load_file(path)
        else:
            mapped = zipfile.is_zipfile(path)
            found = torch.load(path, map_location=host_device(), weights_only=True, mmap=mapped)
    except UsageError:
        raise
    except Exception as error:  # torch and safetensors raise all sorts of errors
        reason = str(error).splitlines()[0][:200] if str(error) else ""
        raise CheckpointError(
            f"{path} is damaged, or not a file of weights", why=f"{type(error).__name__}: {reason}"
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    return dict(found)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "safetensors is not installed", do="pip install 'stepgraph[hf]', or use a .pt file"
        ) from error
    return safetensors.torch
