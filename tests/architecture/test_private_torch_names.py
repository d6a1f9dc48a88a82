"""Rules about the source that neither a linter nor the import floors can state."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepgraph

SOURCE = Path(stepgraph.__file__).parent
PORTING_PLACE = SOURCE / "torch_internals"
OPERATORS = SOURCE / "operators"
# The launcher; which kernels a kind of device has; which kind a row of the device table is.
NAMES_DEVICES = (
    SOURCE / "cli" / "launcher.py",
    SOURCE / "lowering" / "attention.py",
    SOURCE / "planning" / "target.py",
)
MAX_LINES = 400

# A whole string that is such a name: operators are often looked up or compared by their names.
PRIVATE_STRING = re.compile(r"torch(\.\w+)*\._(?!_)\S*|_c10d_functional\S*|aten(::|\.)_(?!_)\S*")
DEVICE_STRING = re.compile(r"(cpu|cuda|gloo|nccl)([:,].*)?")


def source_files(*, except_for: tuple[Path, ...]) -> list[Path]:
    paths = sorted(SOURCE.rglob("*.py"))
    return [path for path in paths if not any(map(path.is_relative_to, except_for))]


def is_private(dotted: str) -> bool:
    """Whether a path below torch has a component such as `_dynamo` (and not `__version__`)."""
    root, *components = dotted.split(".")
    return root == "torch" and any(c.startswith("_") and not c.startswith("__") for c in components)


def string_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string but docstrings: a string that is a statement of its own is one."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_string and node not in docstrings:
            yield node.lineno, node.value


def torch_aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported or assigned name stands for (``aten = torch.ops.aten``), in whichever scope."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.asname:
                    aliases[name.asname] = name.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (path := dotted_path(node.value, aliases)):
            aliases |= {target.id: path for target in node.targets if isinstance(target, ast.Name)}
    return aliases


def dotted_path(node: ast.AST, aliases: dict[str, str]) -> str:
    """The full path of a chain `a.b.c` rooted at an import; empty for any other expression."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (root := dotted_path(node.value, aliases)):
        return f"{root}.{node.attr}"
    return ""


def private_torch_names(source: str) -> set[tuple[int, str]]:
    """The line and name of each use of a private torch API."""
    tree = ast.parse(source)
    aliases = torch_aliases(tree)
    found = {hit for hit in string_literals(tree) if PRIVATE_STRING.fullmatch(hit[1])}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_path(node, aliases)]
        found |= {(node.lineno, name) for name in names if is_private(name)}
    return found


def report(path: Path, hits: set[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(SOURCE)}:{line}: {name}" for line, name in sorted(hits)]


def is_private_operator(name: str) -> bool:
    return name.startswith(("torch.ops.aten._", "aten._", "aten::_"))


def test_only_torch_internals_uses_private_torch_names():
    """``operators`` may name private operators, and no other private name."""
    uses = []
    for path in source_files(except_for=(PORTING_PLACE,)):
        hits = private_torch_names(path.read_text())
        if path.is_relative_to(OPERATORS):
            hits = {hit for hit in hits if not is_private_operator(hit[1])}
        uses += report(path, hits)
    assert not uses, "give these a public name in torch_internals:\n" + "\n".join(uses)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch import _dynamo",
        "from torch._subclasses import FakeTensorMode",
        "from torch.fx.node import _side_effectful_functions",
        "import torch\ntorch.fx._pytree",
        "import torch.distributed as dist\ndist._functional_collectives.wait_tensor(x)",
        "from torch import distributed\ndistributed._tensor",
        "torch.ops._c10d_functional.wait_tensor.default",
        "from torch import ops\nops._c10d_functional",
        "importlib.import_module('torch._dynamo')",
        "name = '_c10d_functional.wait_tensor'",
        "import torch\ntorch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\naten._softmax",
        "import torch\ndef f():\n    ops = torch.ops.aten\n    return ops._softmax.default",
        "name = 'aten::_to_copy'",
        "name = 'aten._to_copy.default'",
    ],
)
def test_a_private_torch_name_is_found(source):
    assert private_torch_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "from __future__ import annotations",
        "from stepgraph.torch_internals import wait_tensor",
        "from . import _private",
        "self._torch._private",
        "def f():\n    '''torch._dynamo'''",
        "# torch._dynamo",
        "message = 'torch._dynamo broke the graph'",
        "import torch\naten = torch.ops.aten\naten.__rshift__.Scalar",
        "import torch\naten = torch.ops.aten\naten.view.default",
    ],
)
def test_other_names_are_left_alone(source):
    assert not private_torch_names(source)


def test_only_the_launcher_names_devices_and_backends():
    uses = []
    for path in source_files(except_for=NAMES_DEVICES):
        literals = string_literals(ast.parse(path.read_text()))
        uses += report(path, {hit for hit in literals if DEVICE_STRING.fullmatch(hit[1])})
    assert not uses, "ask the launcher, a tensor or the mesh instead:\n" + "\n".join(uses)


def test_no_file_is_longer_than_the_limit():
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    too_long = [f"{p.relative_to(SOURCE)}: {n}" for p, n in lengths.items() if n > MAX_LINES]
    assert not too_long, f"split what passes {MAX_LINES} lines: {too_long}"


def test_every_folder_is_a_package():
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    bare = [str(f.relative_to(SOURCE)) for f in folders if not (f / "__init__.py").exists()]
    assert not bare, f"the import floors are not checked in folders without __init__.py: {bare}"


def test_no_module_hides_a_public_name():
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    hidden = modules & set(stepgraph.__all__)
    assert not hidden, f"importing stepgraph.NAME would replace the public name: {hidden}"


def test_import_is_light():
    program = """
import json, sys
import stepgraph
import torch
print(json.dumps({
    "transformers": "transformers" in sys.modules,
    "CUDA": torch.cuda.is_initialized(),
    "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not any(json.loads(run.stdout).values()), run.stdout
