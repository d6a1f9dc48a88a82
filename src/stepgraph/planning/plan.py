"""The Plan: the four decisions for the programs of one training step, as data.

A plan made from a preset starts without decisions about single values; compiling fills them in, and
compiling again replays them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.errors import PlanError
from stepgraph.planning.decisions import MemoryDecision, OperationPlacement, PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import InnerShard, MeshShape, Placements, show
from stepgraph.program.program import Program

VERSION = 1
_LARGEST_FILE = 256 * 2**20


@dataclass
class Plan:
    """The four decisions.

    ``placement``, ``memory``, ``schedule`` and ``lowering`` name the policies; ``placements`` and
    ``recomputation`` hold what they decided, per program (``step``, ``accumulate``; a second form of
    a program, with other parameters frozen say, is ``step#2``). ``from_file``: a program that the
    decisions do not fit is an error, not decided afresh.
    """

    placement: str
    mesh: MeshShape
    memory: str = "none"
    schedule: str = "none"
    lowering: str = "inductor"
    placements: dict[str, PlacementDecision] = field(default_factory=dict)
    recomputation: dict[str, MemoryDecision] = field(default_factory=dict)
    from_file: bool = False

    def find_placement(self, program: Program) -> str | None:
        """The key of the decisions that fit a global Program, or None where there are none.

        Raises:
            PlanError: the plan comes from a file, and what it says of this program does not fit.
        """
        wanted = _named_values(program)
        problem = ""
        for key, decision in self.placements.items():
            if key.split("#")[0] != program.name:
                continue
            held = {*decision.inputs, *decision.outputs, *decision.operations}
            if wanted == held:
                return key
            missing, unknown = sorted(wanted - held), sorted(held - wanted)
            problem = (
                f"the plan lacks {missing[:3]}, and has {unknown[:3]}, which the model has not"
            )
        if problem and self.from_file:
            raise PlanError(
                f"the plan's decisions for program {program.name!r} do not fit this model",
                why=problem,
                do="make the plan again for this model, or start from a preset",
            )
        return None

    def parameters(self) -> dict[str, Placements]:
        """Where the programs decided so far store parameters, by name."""
        found: dict[str, Placements] = {}
        for decision in self.placements.values():
            for label, placements in decision.inputs.items():
                if label.startswith("Param("):
                    found[label[len("Param(") : -1]] = placements
        return found

    def new_key(self, name: str) -> str:
        """A free key for the decisions of a program."""
        number = 1 + sum(key.split("#")[0] == name for key in self.placements)
        return name if number == 1 else f"{name}#{number}"

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            PlanError: not a plan, of another version, or too large.
        """
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"there is no plan file {str(path)!r}")
        if path.stat().st_size > _LARGEST_FILE:
            raise PlanError(f"{path} is larger than {_LARGEST_FILE // 2**20} MiB: not a plan")
        try:
            plan = Plan.from_json(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"{path} is not a plan file", why=f"{type(error).__name__}: {error}"
            ) from error
        plan.from_file = True
        return plan

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "version": VERSION,
            "mesh": [list(dim) for dim in self.mesh.dims],
            "placement": self.placement,
            "memory": self.memory,
            "schedule": self.schedule,
            "lowering": self.lowering,
            "placements": {
                name: {
                    "preset": d.preset,
                    "inputs": {key: show(p) for key, p in d.inputs.items()},
                    "outputs": {key: show(p) for key, p in d.outputs.items()},
                    "operations": {
                        key: [
                            [show(p) for p in o.inputs],
                            [None if p is None else show(p) for p in o.outputs],
                        ]
                        for key, o in d.operations.items()
                    },
                    "unruled": d.unruled,
                    "notes": d.notes,
                }
                for name, d in self.placements.items()
            },
            "recomputation": {
                name: {"policy": d.policy, "recompute": d.recompute, "notes": d.notes}
                for name, d in self.recomputation.items()
            },
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        if data["version"] != VERSION:
            raise PlanError(f"plan version {data['version']} cannot be read, only {VERSION}")
        placements = {
            name: PlacementDecision(
                d["preset"],
                {key: parse_placements(p) for key, p in d["inputs"].items()},
                {key: parse_placements(p) for key, p in d["outputs"].items()},
                {
                    key: OperationPlacement(
                        tuple(parse_placements(p) for p in inputs),
                        tuple(None if p is None else parse_placements(p) for p in outputs),
                    )
                    for key, (inputs, outputs) in d["operations"].items()
                },
                dict(d["unruled"]),
                list(d.get("notes", ())),
            )
            for name, d in data["placements"].items()
        }
        recomputation = {
            name: MemoryDecision(d["policy"], dict(d["recompute"]), list(d["notes"]))
            for name, d in data["recomputation"].items()
        }
        return Plan(
            placement=str(data["placement"]),
            mesh=MeshShape(tuple((str(n), int(s)) for n, s in data["mesh"])),
            memory=str(data["memory"]),
            schedule=str(data["schedule"]),
            lowering=str(data["lowering"]),
            placements=placements,
            recomputation=recomputation,
        )


def _named_values(program: Program) -> set[str]:
    """Everything in a Program that a placement decision names."""
    return {
        *(roles.label(role) for role in program.inputs),
        *(roles.label(role) for role in program.outputs),
        *(node.meta["name"] for node in program.operations()),
    }


def parse_placements(text: str) -> Placements:
    """The inverse of :func:`stepgraph.program.layout.show`."""
    found: list[Any] = []
    rest = text
    while rest:
        head, rest = rest[0], rest[1:]
        argument = ""
        if rest.startswith("("):
            argument, _, rest = rest[1:].partition(")")
        if head == "R":
            found.append(Replicate())
        elif head == "S":
            dim, _, blocks = argument.partition("/")
            found.append(InnerShard(int(dim), int(blocks)) if blocks else Shard(int(dim)))
        elif head == "P":
            found.append(Partial(argument or "sum"))
        else:
            raise ValueError(f"unknown placement {text!r}")
    return tuple(found)
