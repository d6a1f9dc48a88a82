"""Code that leaves the type that a model computes in: where it is, and what to do.

Under ``compute_dtype`` parameters and inputs are cast. A cast that the code makes itself (``x.float()``
between two layers) then brings two types together, which torch refuses, on fakes only in some operations.
"""

import re

import torch

from stepgraph.capture.refusals import first_paragraph, line_of
from stepgraph.errors import CaptureError
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

_TWO_TYPES = re.compile(r"same d?type|should be the same|scalar type|mixed dtype")
aten = torch.ops.aten
_OF_ONE_TYPE = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default,
}  # fmt: skip


def check_types(program: Program, compute: torch.dtype | None) -> None:
    """Refuses products of two types under ``compute_dtype``.

    Raises:
        CaptureError: names the operation and its line.
    """
    if compute is None:
        return
    for node in program.operations():
        if node.target not in _OF_ONE_TYPE:
            continue
        types = dict.fromkeys(
            str(meta(argument)["val"].dtype).removeprefix("torch.")
            for argument in node.all_input_nodes
        )
        if len(types) > 1:
            line = meta(node).get("source")
            where = f"{meta(node)['name']}: {line}" if line else meta(node)["name"]
            raise _mixed(compute, where, f"here it is {' and '.join(types)}")


def mixed_types_error(error: BaseException, compute: torch.dtype | None) -> CaptureError | None:
    """What says so where torch has refused: None for an error about something else.

    Args:
        compute: the type that parameters and inputs were cast to; None: they were not.
    """
    if compute is None or not _TWO_TYPES.search(str(error)):
        return None
    return _mixed(compute, line_of(error), first_paragraph(str(error)))


def _mixed(compute: torch.dtype, where: str | None, why: str) -> CaptureError:
    named = str(compute).removeprefix("torch.")
    return CaptureError(
        f"the model puts two types together under compute_dtype={named}",
        where=where,
        why=f"parameters and inputs are {named}, and code between them makes another type: {why}",
        do="cast back in front of the next layer (x.to(self.layer.weight.dtype)), take out the cast, or "
        "leave compute_dtype and use torch.autocast in the forward",
    )
