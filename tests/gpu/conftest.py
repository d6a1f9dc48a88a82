"""What runs on a GPU is written down, whichever process of several runs it."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path

# Before the device is used: cuBLAS then adds up in one order, and its memory is of one size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from filelock import FileLock

from stepgraph.torch_internals.limits import SAFE_GUARDS

# What plain torch compiles here is guarded as what the engine compiles: before 2.12 processes crashed.
for _name, _value in SAFE_GUARDS.items():
    setattr(torch._dynamo.config, _name, _value)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def record(request, tmp_path_factory):
    """Rows of a test, which join those of its file's ``RESULTS``; rows of another device or torch go."""
    rows: dict = {}
    yield rows
    path = RESULTS / request.module.RESULTS
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with FileLock(tmp_path_factory.getbasetemp().parent / f"{path.name}.lock"):
        before = json.loads(path.read_text()) if path.is_file() else {}
        kept = before.get("rows", {}) if before | about == before else {}
        path.write_text(
            json.dumps(about | {"rows": dict(sorted((kept | rows).items()))}, indent=1) + "\n"
        )


@pytest.fixture(autouse=True)
def one_device_for_each_test(request):
    """True float32, kernels that add up in one order each time, and nothing left of the test before.

    A file with ``BITWISE`` allows no others: attention's own is in one order only then.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(
        True, warn_only=not getattr(request.module, "BITWISE", False)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic.*")
        warnings.filterwarnings("ignore", ".*should not be instantiated.*")  # of torch's own vmap
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")  # hints
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # peft's
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = True
    gc.collect()
    torch.cuda.empty_cache()
