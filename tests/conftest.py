"""Settings that every test shares."""

import gc
import logging
import multiprocessing
import os

# Before torch and transformers are imported; rank processes that a test starts inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("STEPGRAPH_PROGRESS", "0")  # what takes long does so where a machine is busy
# What was measured on somebody's machine decides nothing here: there is no such file.
os.environ["STEPGRAPH_CALIBRATION"] = os.path.join(os.devnull, "none")

import pytest
import torch
from hypothesis import settings

from tests import cuda_fakes

torch.set_num_threads(1)

# Pytest (9.1) listens to each logger that does not propagate; torch writes all that it compiles, as text,
# to this one as soon as anybody listens.
logging.getLogger("torch.__trace").propagate = True

# Ranks that tests launch are forked from one server that has imported what they need: the import
# takes seconds, and there are some sixty launches.
multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(
    [
        "stepgraph",
        "torch._inductor.compile_fx",
        "transformers.models.llama.modeling_llama",
        "tests.support",
    ]
)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=12)
settings.register_profile("nightly", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("STEPGRAPH_HYPOTHESIS", "ci"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups hold: where they do not, as with pytest 9.2, both workers make what one should."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError("this pytest does not let pytest-xdist group tests: make venv")


def pytest_collection_finish() -> None:
    """No garbage is looked for among half a million objects of torch, which live to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def collect_garbage():
    """Make a leaked file or socket fail in the module that leaked it, not wherever gc runs next.

    What is alive after it is not looked at again: caches that grow would be walked for every module.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory):
    """The library under which torch traces for a CUDA device that is not there."""
    return cuda_fakes.build(tmp_path_factory.mktemp("cuda_fakes"))
