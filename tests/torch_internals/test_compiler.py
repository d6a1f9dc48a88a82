"""The C++ header of all kernels is compiled while the step's code is captured, where it is missing."""

import json
import os
import subprocess
import sys

import pytest

from stepgraph.torch_internals.compiler import cpp_compiler

SCRIPT = """
import json, os
import torch
from pathlib import Path
from stepgraph.torch_internals.compiler import precompile_headers

folder = Path(os.environ["TMPDIR"])
begun = precompile_headers()
assert begun is not None
begun.join()
made = [str(path) for path in folder.rglob("*.gch")]
found = torch.compile(lambda x, y: (x.sin() * y).sum(-1))(torch.ones(40, 8), torch.ones(40, 8))
then = [str(path) for path in folder.rglob("*.gch")]
again = precompile_headers()
print(json.dumps([made, then, again is None]))
"""


@pytest.mark.slow
def test_inductor_takes_the_header_that_was_begun_before_it(tmp_path):
    assert cpp_compiler()
    cold = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | cold, capture_output=True, text=True, check=True,
    )  # fmt: skip
    made, then, nothing_to_do = json.loads(ran.stdout.splitlines()[-1])
    assert len(made) == 1 and then == made and nothing_to_do
