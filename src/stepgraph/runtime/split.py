"""Forward and backward as two calls, with the caller's own autograd graph between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Shard

from stepgraph import torch_internals
from stepgraph.program import roles
from stepgraph.program.mesh_roles import role_of
from stepgraph.program.program import Value
from stepgraph.runtime.executor import LoweredProgram
from stepgraph.runtime.state import State


@dataclass
class SplitProgram:
    """The two sides of a program ``gradients``, and where parameters and their gradients live."""

    forward: LoweredProgram
    backward: LoweredProgram
    state: State

    def __post_init__(self) -> None:
        program = self.forward.program
        values = dict(zip(program.outputs, program.output_values, strict=True))
        self.gradients = {r.name: value for r, value in values.items() if isinstance(r, roles.Grad)}
        kinds = (roles.Loss, roles.ModuleResult)
        self.results = [role for role in program.outputs if isinstance(role, kinds)]
        self.shares = [self._share(values[role]) for role in self.results]
        own = {role.name for role in program.outputs if isinstance(role, roles.NewBuffer)}
        buffers = self.backward.buffers.items()
        self._read_again = [buffer for name, buffer in buffers if name not in own]

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the forward; the results carry a graph, whose backward adds to the parameters' ``.grad``.

        A gradient is that of the loss on the global batch, where results are those of the global batch;
        of results that are this rank's rows it is the mean over data-parallel ranks, as with DDP.
        """
        parameters = map(self.state.model.get_parameter, self.gradients)
        return list(_Call.apply(self, list(leaves), *parameters))

    def _share(self, result: Value) -> float:
        """What a tangent counts for: a rank's own rows for one rank of many."""
        own = any(isinstance(placement, Shard) for placement in result.placements or ())
        return 1.0 / self.state.ranks.shape.data_size if own else 1.0

    def mean_tangent(
        self, result: roles.Output, tangent: torch.Tensor, share: float
    ) -> torch.Tensor:
        """What the backward takes: the mean over data-parallel ranks of their losses' gradients."""
        if share != 1.0:
            return tangent * share
        ranks = self.state.ranks
        alone = ranks.shape.data_size == 1 or not tangent.is_floating_point()
        if alone or not isinstance(result, roles.ModuleResult):
            return tangent
        # A result that every rank has may be used in losses that differ from rank to rank.
        total = tangent.contiguous()
        for name, group in ranks.groups.items():
            if role_of(name).divides_batch:
                total = torch_internals.sum_over_group(total, group)
        return total / ranks.shape.data_size

    def versions(self) -> list[int]:
        """How often what the backward reads was written, to find that it was in between."""
        named = map(self.state.model.get_parameter, self.gradients)
        return [tensor._version for tensor in (*named, *self._read_again)]


CHANGED_BETWEEN = (
    "a parameter or buffer was changed between forward and backward: run the forward again, or call "
    "backward before the optimizer"
)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, split: SplitProgram, leaves: list, *parameters: nn.Parameter):
        found = split.forward.run(leaves)
        saved = [value for role, value in found.items() if isinstance(role, roles.Saved)]
        ctx.save_for_backward(*saved)
        ctx.split, ctx.versions = split, split.versions()
        results = tuple(found[role].detach() for role in split.results)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *tangents: torch.Tensor):
        split: SplitProgram = ctx.split
        if split.versions() != ctx.versions:
            raise RuntimeError(CHANGED_BETWEEN)
        brought: dict[roles.Input, torch.Tensor] = {
            roles.Saved(index): value for index, value in enumerate(ctx.saved_tensors)
        }
        for role, tangent, share in zip(split.results, tangents, split.shares, strict=True):
            of_module = isinstance(role, roles.ModuleResult)
            taken = roles.ResultTangent(role.index) if of_module else roles.Tangent()
            brought[taken] = split.mean_tangent(role, tangent, share)
        found = split.backward.run((), brought)
        state = split.state
        gradients = split.gradients.items()
        return (
            None,
            None,
            *(state.as_dtensor(found[roles.Grad(n)], value) for n, value in gradients),
        )
