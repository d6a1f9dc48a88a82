"""The walls of the house: which file may import which, how large a file and a room may be."""

import ast
import statistics
from pathlib import Path

import pytest

import stepgraph

SOURCE = Path(stepgraph.__file__).parent
ROOMS = {"capture", "placement", "memory", "schedule", "lowering"}  # they meet in the pipeline only
# From the ground up; pyproject.toml has them for lint-imports, which does not look inside functions.
FLOORS = (
    {"errors", "torch_internals"},
    {"program", "operators"},
    {"planning", "cost", "analysis"},
    ROOMS,
    {"pipeline"},
    {"contest"},
    {"leading"},
    {"graphwise", "runtime", "report"},
    {"equivalence"},
    {"api"},
    {"cli"},
)
LARGEST_FILE, LARGEST_ROOM, MEDIAN_FILE = 400, 3_000, 150

Imports = dict[str, set[str]]
"""File -> files that it imports, as dotted names."""


def dotted(path: Path, source: Path) -> str:
    parts = [source.name, *path.relative_to(source).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: Path) -> Imports:
    """Imports inside functions count, and those for types alone."""
    files = {dotted(path, source): path for path in source.rglob("*.py")}
    found: Imports = {}
    for name, path in files.items():
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports by a relative path"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= inside & files.keys() or {str(node.module)}
        found[name] = (wanted & files.keys()) - {name}
    return found


def circles(imports: Imports) -> list[list[str]]:
    """Files that import each other, by one or more steps."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        rest = [start]
        while rest:
            rest += imports[rest.pop()] - found
            found |= set(rest)
        return found

    behind = {name: reached(name) for name in imports}
    found = set()
    for name in imports:
        if name in behind[name]:
            found.add(tuple(sorted(other for other in behind[name] if name in behind[other])))
    return [list(circle) for circle in found]


def room(name: str) -> str:
    """The top-level package or file of a dotted name; empty for stepgraph itself."""
    return (name.split(".") + [""])[1]


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of(SOURCE)


def pairs(imports: Imports) -> list[tuple[str, str]]:
    return sorted((name, other) for name, wanted in imports.items() for other in wanted)


def test_no_two_files_import_each_other(imports):
    assert not circles(imports)


def test_a_circle_is_found_through_functions_and_types(tmp_path):
    source = tmp_path / "house"
    source.mkdir()
    (source / "__init__.py").write_text("")
    (source / "a.py").write_text("def f():\n    from house import b\n")
    (source / "b.py").write_text("from house.c import x\n")
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.a\n"
    (source / "c.py").write_text(types)
    (source / "d.py").write_text("import house.a\n")
    assert circles(imports_of(source)) == [["house.a", "house.b", "house.c"]]


def test_every_room_stands_on_a_floor():
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - set().union(*FLOORS) <= {"__init__", "__main__", "__pycache__"}


def test_an_import_never_goes_up_a_floor(imports):
    floor = {name: height for height, names in enumerate(FLOORS) for name in names}
    up = [
        f"{name} imports {other}"
        for name, other in pairs(imports)
        if room(name) in floor and floor[room(name)] < floor.get(room(other), len(FLOORS))
    ]
    assert not up


def test_the_rooms_do_not_import_each_other(imports):
    across = [
        f"{name} imports {other}"
        for name, other in pairs(imports)
        if {room(name), room(other)} <= ROOMS and room(name) != room(other)
    ]
    assert not across, "they meet in the pipeline, over Program and Plan"


def test_files_and_rooms_are_small():
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {p.name: n for p, n in lengths.items() if n > LARGEST_FILE}
    assert statistics.median(lengths.values()) <= MEDIAN_FILE
    rooms: dict[Path, int] = {}
    for path, length in lengths.items():
        for folder in path.parents:
            if SOURCE in folder.parents:
                rooms[folder] = rooms.get(folder, 0) + length
    large = {folder for folder, length in rooms.items() if length >= LARGEST_ROOM}
    undivided = [f.name for f in large if not any(inner.parent == f for inner in rooms)]
    assert not undivided, f"a room of {LARGEST_ROOM} lines wants rooms inside"


def test_what_people_call_declares_no_pass():
    found = [
        str(path.relative_to(SOURCE))
        for name in ("api", "cli")
        for path in (SOURCE / name).rglob("*.py")
        if any(
            isinstance(node, (ast.Name, ast.alias, ast.Attribute))
            and "program_pass" in ast.dump(node)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert not found


def test_metadata_of_nodes_has_one_accessor():
    """``node.meta`` itself is for torch's own keys, before they are translated."""
    of_torch = {"program/metadata.py", "capture/annotations.py"}
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in of_torch
        and not path.is_relative_to(SOURCE / "torch_internals")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "meta"
    ]
    found = [place for place in found if not place.startswith("placement/rules/redistribution.py")]
    assert not found, "use stepgraph.program.metadata.meta"
