"""The Plan: the four decisions for the programs of one training step, as data.

A plan made from a preset starts without decisions; :func:`stepgraph.pipeline.decide` gives a new one that
holds them, and a second compilation replays it. :mod:`stepgraph.planning.file` has its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import Shard

from stepgraph.cost.predict import Prediction
from stepgraph.errors import PlanError
from stepgraph.planning.decisions import (
    Decisions,
    FrontierPoint,
    Frozen,
    OperationPlacement,
    PlacementDecision,
    Table,
)
from stepgraph.planning.facts import ValueFacts
from stepgraph.planning.fingerprint import Fingerprint
from stepgraph.planning.request import Request
from stepgraph.program import roles
from stepgraph.program.layout import InnerShard, MeshShape, Placements, show
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments, tensors_of

Kind = TypeVar("Kind", bound="Plan")


@dataclass(frozen=True)
class Plan(Frozen):
    """The four decisions, and the request that they answer.

    Attributes:
        request: names the policies, the mesh and the step.
        decisions: per program (``step``, ``accumulate``; a second form of a program, with other parameters
            frozen say, is ``step#2``).
        final: a program that the decisions do not fit is an error, not decided afresh; so are plans of
            files and of ``stepgraph.plan``.
        fingerprint: of the model that it was made for.
        predicted: what a step takes, where that was asked for.
        notes: on how it came about.
        values: what is to be told of values, by program and name.
        points: of the memory-time frontier, least memory first, where that was asked for.
        graph_obstacles: what keeps the step from being one CUDA graph, in words; None: it was not asked, or
            the device has no graphs.
    """

    request: Request
    decisions: Mapping[str, Decisions] = Table()
    final: bool = False
    fingerprint: Fingerprint | None = None
    predicted: Prediction | None = None
    notes: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, ValueFacts]] = Table()
    points: tuple[FrontierPoint, ...] | None = None
    graph_obstacles: tuple[str, ...] | None = None

    @property
    def mesh(self) -> MeshShape:
        """Names and sizes of its dimensions."""
        return self.request.mesh

    @property
    def placement(self) -> str:
        """Name of the placement policy."""
        return self.request.placement

    @property
    def decides(self) -> str:
        """Which policy places programs: of a search that took a preset's answer, that preset."""
        taken = (decided.placement.preset for decided in self.decisions.values())
        return next(taken, self.placement) if self.request.searches else self.placement

    @property
    def memory(self) -> str:
        """Name of the memory policy."""
        return self.request.memory

    @property
    def schedule(self) -> str:
        """Name of the schedule policy."""
        return self.request.schedule

    @property
    def lowering(self) -> str:
        """Name of the lowering."""
        return self.request.lowering

    @property
    def reasons(self) -> dict[str, Any]:
        """Why a solver chose what it chose, by value; empty for a preset, which has no alternatives."""
        return self._of_placements("reasons")

    def under(self: Kind, **policies: Any) -> Kind:
        """The plan for another request: what the change does not touch stays decided.

        Args:
            policies: fields of :class:`Request`.
        """
        request = replace(self.request, **policies)
        if request == self.request:
            return self
        changed = {name for name, value in policies.items() if value != getattr(self.request, name)}
        kept = {} if changed & _ASKED_OF_PLACEMENT else dict(self.decisions)
        for name, behind in _BEHIND.items():
            if name in changed:
                dropped = dict.fromkeys(behind)
                kept = {key: replace(decided, **dropped) for key, decided in kept.items()}
        same = not changed & (_ASKED_OF_PLACEMENT | {"memory", "schedule"})
        predicted = self.predicted if same else None
        points = self.points if same else None
        told = self.graph_obstacles if same else None
        known = {"predicted": predicted, "points": points, "graph_obstacles": told}
        return replace(self, request=request, decisions=Table(kept), **known)

    def with_decisions(self: Kind, key: str, decided: Decisions) -> Kind:
        """The plan that also holds the decisions for a program."""
        return replace(self, decisions=Table({**self.decisions, key: decided}))

    def check_model(self, model: nn.Module) -> None:
        """Compares a model with the one that this plan was made for, where it is known.

        Raises:
            PlanError: says what differs.
        """
        if self.final and self.fingerprint is not None:
            self.fingerprint.check(model)

    def key_of(self, program: Program) -> str | None:
        """The key of the decisions that fit a global Program, or None where there are none.

        Raises:
            PlanError: the plan is final, and what it says of this program does not fit.
        """
        wanted = named_values(program)
        problem = ""
        for key, decided in self.decisions.items():
            if key.split("#")[0] != program.name:
                continue
            decision = decided.placement
            held = {*decision.inputs, *decision.outputs, *decision.operations}
            if wanted == held:
                problem = _misfit(decision, program, self.mesh) if self.final else ""
                if not problem:
                    return key
                break
            missing, unknown = sorted(wanted - held), sorted(held - wanted)
            problem = f"the plan lacks {missing[:3]}, and has {unknown[:3]}, which the step has not"
        if problem and self.final:
            made = f"; it was made for {self.request.show()}" if self.request.device else ""
            raise PlanError(
                f"the plan's decisions for program {program.name!r} do not fit this model",
                why=problem + made,
                do="make the plan again for this model and these settings, or start from a preset",
            )
        return None

    def inputs(self) -> dict[str, Placements]:
        """Where the programs decided so far store their inputs, by label."""
        return self._of_placements("inputs")

    def operations(self) -> dict[str, OperationPlacement]:
        """How the programs decided so far place operations, by stable name."""
        return self._of_placements("operations")

    def _of_placements(self, field: str) -> dict[str, Any]:
        """One field of every program's placement decision, together."""
        found: dict[str, Any] = {}
        for decided in self.decisions.values():
            found |= getattr(decided.placement, field)
        return found

    def first_placed(self) -> str:
        """The first operation that ranks do not repeat, with its placement; empty where none is known."""
        for name, operation in self.operations().items():
            for placements in operation.outputs:
                if placements and not all(placed.is_replicate() for placed in placements):
                    return f"{name} ({show(placements)})"
        return ""

    def new_key(self, name: str) -> str:
        """A free key for the decisions of a program."""
        number = 1 + sum(key.split("#")[0] == name for key in self.decisions)
        return name if number == 1 else f"{name}#{number}"


# A step, batch or device that differs shows in the programs, which decisions fit or do not.
_ASKED_OF_PLACEMENT = {"placement", "mesh", "constraints", "memory_budget", "correction"}
# What follows from a policy.
_BEHIND = {"memory": ("memory", "schedule"), "schedule": ("schedule",), "lowering": ("lowering",)}


def preset_plan(placement: str, mesh: MeshShape, **policies: Any) -> Plan:
    """A plan that names policies (fields of :class:`Request`), and holds no decision yet."""
    return Plan(Request(placement, mesh, **policies))


def states_away(plan: Plan) -> tuple[str, ...] | None:
    """Optimizer states that programs have on the host, by label; None: none that has any is decided."""
    known = [
        decided.memory.offload or ()
        for decided in plan.decisions.values()
        if decided.memory is not None and any(map(is_state, decided.placement.inputs))
    ]
    found = {label for labels in known for label in labels if is_state(label)}
    return tuple(sorted(found)) if known else None


def is_state(label: str) -> bool:
    """Whether it is that of an optimizer state."""
    return label.startswith(f"{roles.OptimizerState.__name__}(")


def named_values(program: Program) -> set[str]:
    """Everything in a Program that a placement decision names."""
    return {
        *(roles.label(role) for role in program.inputs),
        *(roles.label(role) for role in program.outputs),
        *(meta(node)["name"] for node in program.operations()),
    }


def _misfit(decision: PlacementDecision, program: Program, mesh: MeshShape) -> str:
    """What is wrong with a decision that names all that a global Program has; empty: nothing.

    Checks counts and dimensions. That the placements are right together is for ``stepgraph.check``.
    """
    sides = (program.input_rows, decision.inputs), (program.output_rows, decision.outputs)
    for rows, placed in sides:
        for role, _, value in rows:
            label = roles.label(role)
            if problem := _wrong(placed[label], value.shape, mesh):
                return f"{label} of shape {list(value.shape)} cannot be {problem}"
    for node in program.operations():
        name = meta(node)["name"]
        choice = decision.operations[name]
        arguments = [meta(argument)["val"] for argument in tensor_arguments(node)]
        value = meta(node)["val"]
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        if len(choice.inputs) != len(arguments) or len(choice.outputs) != len(results):
            return (
                f"{name} has {len(arguments)} tensor arguments and {len(results)} results, "
                f"the plan places {len(choice.inputs)} and {len(choice.outputs)}"
            )
        placed = (*choice.inputs, *choice.outputs)
        for placements, value in zip(placed, [*arguments, *results], strict=True):
            tensors = tensors_of(value)
            if placements is None or len(tensors) != 1:
                continue
            if problem := _wrong(placements, tensors[0].shape, mesh):
                return f"{name}: a tensor of shape {list(tensors[0].shape)} cannot be {problem}"
    return ""


def _wrong(placements: Placements, shape: tuple[int, ...], mesh: MeshShape) -> str:
    if len(placements) != len(mesh.dims):
        return f"{show(placements)} on the mesh {mesh}"
    for placement in placements:
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            return f"{show(placements)}: there is no dimension {placement.dim}"
        if isinstance(placement, InnerShard) and shape[placement.dim] % placement.outer:
            return f"{show(placements)}: {placement.outer} blocks do not divide it"
    return ""
