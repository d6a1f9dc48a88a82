"""The question that a plan answers, as data: nothing of it is a module or a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepgraph.cost.correction import AS_IT_IS as RIGHT
from stepgraph.cost.correction import Correction, corrected
from stepgraph.cost.device import Device
from stepgraph.cost.devices import find_device
from stepgraph.planning.decisions import Frozen, Table
from stepgraph.planning.reading import AnyInteger, Positive, TypeText
from stepgraph.program.layout import MeshShape

AUTO = "auto"  # a policy that searches for what others name
NONE = "none"  # one of memory that keeps all
BUDGET = "budget"  # and one of memory, that says within how many bytes: budget:SIZE


def is_searched(memory: str) -> bool:
    """Whether a memory policy says how much memory there is, and not what is kept of it."""
    return memory == AUTO or memory.startswith(f"{BUDGET}:")


@dataclass(frozen=True)
class Precision:
    """The types of a step.

    ``compute``: what parameters and floating-point inputs are cast to; None: as they are. ``reduce``:
    what gradients are reduced in; None: what they are computed in.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


AS_IT_IS = Precision()


@dataclass(frozen=True)
class StepSettings:
    """What a step is, besides model, loss and batch.

    Attributes:
        optimizer: its name in lower case (``adamw``); None: gradients only.
        micro_batches: the batch is split into so many.
        clip: gradients are clipped by their global norm; by how much is an input.
        precision: of the program.
        seed: of random operations.
    """

    optimizer: str | None = None
    micro_batches: Positive = 1
    clip: bool = False
    precision: Precision = AS_IT_IS
    seed: AnyInteger = 0


@dataclass(frozen=True)
class Request(Frozen):
    """What is asked of the four rooms.

    Attributes:
        placement, memory, schedule, lowering: names of policies.
        device: whose costs count, by name; empty: costs are not asked for.
        batch: type and global shape of each tensor leaf, by its path: ``int64[32, 8192]``.
        memory_budget: bytes per rank over the whole step, optimizer state included; None: the device's.
        constraints: patterns of names to placements, or a mesh dimension to a preset.
        correction: of the device's costs, as a run has shown them; None: as they are.
    """

    placement: str
    mesh: MeshShape
    memory: str = NONE
    schedule: str = AUTO
    lowering: str = "inductor"
    step: StepSettings = StepSettings()
    device: str = ""
    batch: Mapping[str, TypeText] = Table()
    memory_budget: Positive | None = None
    constraints: Mapping[str, str] = Table()
    correction: Correction | None = None

    @property
    def known(self) -> Correction:
        """The correction in force."""
        return self.correction or RIGHT

    def costs(self) -> Device:
        """The device whose costs count, corrected.

        Raises:
            UsageError: an unknown name.
        """
        return corrected(find_device(self.device), self.known)

    def counted(self, budget: int) -> int:
        """The bytes of predictions that a budget of so many bytes of a rank has room for."""
        return int(budget / self.known.memory)

    @property
    def decided_by_cost(self) -> bool:
        """Whether anything depends on what is simulated, and so may on the machine that simulates."""
        return self.searches or self.weighs_memory

    @property
    def weighs_memory(self) -> bool:
        """Whether how a step is run depends on the bytes that a rank has."""
        return is_searched(self.memory) or (self.memory_budget is not None and self.memory != NONE)

    @property
    def searches(self) -> bool:
        """Whether placements are searched for, and so may depend on the machine that searches."""
        return self.placement == AUTO

    def show(self) -> str:
        """One line: device, batch, types, optimizer, and what else was asked for."""
        step = self.step
        compute = str(step.precision.compute or "as the parameters are").removeprefix("torch.")
        batch = ", ".join(f"{name} {shape}" for name, shape in self.batch.items())
        parts = [self.device, batch, f"compute {compute}", step.optimizer or "gradients only"]
        if step.micro_batches > 1:
            parts.append(f"{step.micro_batches} micro-batches")
        if step.clip:
            parts.append("gradients clipped")
        if self.memory_budget is not None:
            parts.append(f"budget {self.memory_budget / 2**30:.2f} GiB")
        if self.correction is not None:
            parts.append(f"corrected: {self.correction}")
        parts += [f"{name}: {wanted}" for name, wanted in self.constraints.items()]
        return "; ".join(parts)
