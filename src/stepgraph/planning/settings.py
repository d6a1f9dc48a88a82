"""What a plan was made for, besides the model and the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """The question that a plan answers.

    ``batch`` has the type and global shape of each tensor leaf, by its path: ``int64[32, 8192]``.
    ``compute_dtype`` and ``optimizer`` are names (``bfloat16``, ``adamw``) or None. ``memory_budget``
    is bytes per rank over the whole step, optimizer state included; None: the device's capacity.
    ``constraints`` map patterns of names to placements, or a mesh dimension to a preset.
    """

    device: str
    batch: dict[str, str] = field(default_factory=dict)
    compute_dtype: str | None = None
    optimizer: str | None = None
    memory_budget: int | None = None
    constraints: dict[str, str] = field(default_factory=dict)
    micro_batches: int = 1
    clip: bool = False

    def show(self) -> str:
        """One line: device, batch, types, optimizer, and what else was asked for."""
        batch = ", ".join(f"{name} {shape}" for name, shape in self.batch.items())
        parts = [self.device, batch, f"compute {self.compute_dtype or 'as the parameters are'}"]
        parts.append(self.optimizer or "gradients only")
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.clip:
            parts.append("gradients clipped")
        if self.memory_budget is not None:
            parts.append(f"budget {self.memory_budget / 2**30:.2f} GiB")
        parts += [f"{name}: {wanted}" for name, wanted in self.constraints.items()]
        return "; ".join(parts)
