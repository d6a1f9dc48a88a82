"""Our program for CUDA against what torch itself traces for CUDA: the same kernels, types and saved bytes.

Both are of fake CUDA tensors, backward included; nothing runs on a device.
"""

from __future__ import annotations

import collections

import pytest

from tests import cuda_fakes
from tests.end_to_end.test_one_program import ZOO

TYPES = ("float32", "bfloat16")
NAMES = list(ZOO)
# Every second model in one of the types; all of them in both are slow.
ALL = [(name, dtype) for name in NAMES for dtype in TYPES]
SOME = [(name, TYPES[i % 2]) for i, name in enumerate(NAMES[::6])]
OTHERS = [asked for asked in ALL if asked not in SOME]
# The one attention has its result rows first, the flash kernel has it as the queries are.
LAID_OUT_AGAIN = {("unet", "bfloat16")}

pytestmark = pytest.mark.skipif(bool(cuda_fakes.lacking()), reason=cuda_fakes.lacking())


def traces(library, asked):
    found = cuda_fakes.run("traces", library, *map(":".join, asked))
    return {(one["name"], one["type"]): one for one in found}


def sizes(values):
    return collections.Counter((one["bytes"], one["type"]) for one in values)


def check(one):
    torchs, ours = one["torch"], one["ours"]
    same_masks = True
    for theirs, own in zip(torchs["attentions"], ours["attentions"], strict=True):
        assert {**theirs, "kernel": 0, "masked": 0} == {**own, "kernel": 0, "masked": 0}
        if theirs["masked"] == own["masked"]:
            assert theirs["kernel"] == own["kernel"]
        else:  # one that hides what comes later, or nothing, is not built
            assert theirs["masked"]
            same_masks = False
    apart = [
        {where: [v for v in side["saved"] if v["of_attention"] == where] for where in (False, True)}
        for side in (torchs, ours)
    ]
    assert sizes(apart[0][False]) == sizes(apart[1][False])
    if same_masks and (one["name"], one["type"]) not in LAID_OUT_AGAIN:
        assert sizes(apart[0][True]) == sizes(apart[1][True])
    elif not same_masks:
        assert sum(v["bytes"] for v in apart[1][True]) < sum(v["bytes"] for v in apart[0][True])


@pytest.fixture(scope="module")
def some(cuda_library):
    return traces(cuda_library, SOME)


@pytest.mark.slow
@pytest.mark.xdist_group("traces for CUDA")
@pytest.mark.parametrize("asked", SOME, ids=" ".join)
def test_our_program_for_cuda_is_what_torch_traces_there(some, asked):
    check(some[asked])


@pytest.mark.slow
@pytest.mark.xdist_group("traces for CUDA")
def test_the_others_too(cuda_library):
    for one in traces(cuda_library, OTHERS).values():
        check(one)
