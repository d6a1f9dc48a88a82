"""Plan files, version 3; :mod:`stepgraph.planning.schema` has what stands in one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepgraph.errors import PlanError
from stepgraph.planning.from_json import plan_of
from stepgraph.planning.plan import Plan
from stepgraph.planning.reading import LARGEST_FILE, MalformedError, convert, parse_json, read_bytes
from stepgraph.planning.schema import VERSION, PlanFile
from stepgraph.planning.to_json import plan_to_json


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan file."""
    path.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n")


def load_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
        PlanError: no file, not a plan, malformed, of another version, or too large.
    """
    if not path.is_file():
        raise PlanError(f"there is no plan file {str(path)!r}")
    if path.stat().st_size > LARGEST_FILE:
        raise PlanError(
            f"{path} is larger than {LARGEST_FILE // 2**20} MiB: not a plan",
            do="plans of a thousand layers are smaller",
        )
    try:
        plan = _read_plan(parse_json(read_bytes(path)))
    except MalformedError as error:
        raise PlanError(
            f"{path} is not a plan file",
            where=error.where,
            why=error.problem,
            do="save the plan again: `stepgraph plan ... -o plan.json`, or plan.save(path)",
        ) from error
    except OSError as error:
        raise PlanError(f"{path} cannot be read", why=str(error)) from error
    return replace(plan, final=True)


def plan_from_json(data: Any) -> Plan:
    """The plan in plain data.

    Raises:
        PlanError: malformed, or of another version.
    """
    try:
        return _read_plan(data)
    except MalformedError as error:
        raise PlanError("this is not a plan", where=error.where, why=error.problem) from error


def _read_plan(data: Any) -> Plan:
    """Of another version, no field is read: its fields are other ones."""
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
        raise PlanError(
            f"plan version {str(version)[:20]} cannot be read, only {VERSION}",
            do="make the plan again with this version of stepgraph",
        )
    return plan_of(convert(data, PlanFile))
