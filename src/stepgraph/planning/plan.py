"""The Plan: the four decisions for the programs of one training step, as data.

A plan made from a preset starts without decisions about single values; compiling fills them in, and
compiling again replays them. :mod:`stepgraph.planning.file` has its JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from stepgraph.cost.predict import Prediction
from stepgraph.errors import PlanError
from stepgraph.planning.decisions import MemoryDecision, OperationPlacement, PlacementDecision
from stepgraph.planning.facts import ValueFacts
from stepgraph.planning.fingerprint import Fingerprint
from stepgraph.planning.settings import Settings
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements, show
from stepgraph.program.program import Program

AUTO = "auto"  # a placement or memory policy that is found, not named


@dataclass
class Plan:
    """The four decisions.

    ``placement``, ``memory``, ``schedule`` and ``lowering`` name the policies; ``placements`` and
    ``recomputation`` hold what they decided, per program (``step``, ``accumulate``; a second form of
    a program, with other parameters frozen say, is ``step#2``). ``final``: a program that the
    decisions do not fit is an error, not decided afresh; so are plans of files and of
    ``stepgraph.plan``.

    A plan of ``stepgraph.plan`` also knows the ``fingerprint`` of its model, the ``settings`` it was made
    for, what is ``predicted``, ``notes`` on how it came about, and, per program, what is to be told of
    ``values`` by name.
    """

    placement: str
    mesh: MeshShape
    memory: str = "none"
    schedule: str = "none"
    lowering: str = "inductor"
    placements: dict[str, PlacementDecision] = field(default_factory=dict)
    recomputation: dict[str, MemoryDecision] = field(default_factory=dict)
    final: bool = False
    fingerprint: Fingerprint | None = None
    settings: Settings | None = None
    predicted: Prediction | None = None
    notes: list[str] = field(default_factory=list)
    values: dict[str, dict[str, ValueFacts]] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, dict[str, Any]]:
        """Why a solver chose what it chose, by value: ``chosen``, ``cost_ms``, ``runner_up``, its cost.

        Empty for a preset, which has no alternatives.
        """
        found: dict[str, dict[str, Any]] = {}
        for decision in self.placements.values():
            found |= decision.reasons
        return found

    def check_model(self, model: nn.Module) -> None:
        """Compares a model with the one that this plan was made for, where it is known.

        Raises:
            PlanError: says what differs.
        """
        if self.final and self.fingerprint is not None:
            self.fingerprint.check(model)

    def find_placement(self, program: Program) -> str | None:
        """The key of the decisions that fit a global Program, or None where there are none.

        Raises:
            PlanError: the plan is final, and what it says of this program does not fit.
        """
        from stepgraph.planning.fit import misfit

        wanted = _named_values(program)
        problem = ""
        for key, decision in self.placements.items():
            if key.split("#")[0] != program.name:
                continue
            held = {*decision.inputs, *decision.outputs, *decision.operations}
            if wanted == held:
                problem = misfit(decision, program, self.mesh) if self.final else ""
                if not problem:
                    return key
                break
            missing, unknown = sorted(wanted - held), sorted(held - wanted)
            problem = f"the plan lacks {missing[:3]}, and has {unknown[:3]}, which the step has not"
        if problem and self.final:
            made = f"; it was made for {self.settings.show()}" if self.settings else ""
            raise PlanError(
                f"the plan's decisions for program {program.name!r} do not fit this model",
                why=problem + made,
                do="make the plan again for this model and these settings, or start from a preset",
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

    def inputs(self) -> dict[str, Placements]:
        """Where the programs decided so far store their inputs, by label."""
        found: dict[str, Placements] = {}
        for decision in self.placements.values():
            found |= decision.inputs
        return found

    def operations(self) -> dict[str, OperationPlacement]:
        """How the programs decided so far place operations, by stable name."""
        found: dict[str, OperationPlacement] = {}
        for decision in self.placements.values():
            found |= decision.operations
        return found

    def first_placed(self) -> str:
        """The first operation that ranks do not repeat, with its placement; empty where none is known."""
        for name, operation in self.operations().items():
            for placements in operation.outputs:
                if placements and any(not placement.is_replicate() for placement in placements):
                    return f"{name} ({show(placements)})"
        return ""

    def new_key(self, name: str) -> str:
        """A free key for the decisions of a program."""
        number = 1 + sum(key.split("#")[0] == name for key in self.placements)
        return name if number == 1 else f"{name}#{number}"

    def diff(self, other: Plan) -> str:
        """What ``other`` decides otherwise, grouped; empty where nothing differs."""
        from stepgraph.planning.difference import difference

        return difference(self, other)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        from stepgraph.planning.file import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file; the plan is final.

        Raises:
            PlanError: not a plan, malformed, of another version, or too large.
        """
        from stepgraph.planning.file import load_plan

        return load_plan(Path(path))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        from stepgraph.planning.file import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            PlanError: malformed, or of another version.
        """
        from stepgraph.planning.file import plan_from_json

        return plan_from_json(data)


def _named_values(program: Program) -> set[str]:
    """Everything in a Program that a placement decision names."""
    return {
        *(roles.label(role) for role in program.inputs),
        *(roles.label(role) for role in program.outputs),
        *(node.meta["name"] for node in program.operations()),
    }
