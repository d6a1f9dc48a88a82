"""Random small modules train on random meshes as in plain PyTorch, under every policy.

Examples are drawn anew in the nightly profile (``STEPGRAPH_HYPOTHESIS=nightly``), and the same ones
every time otherwise. What it found is below, by name.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, given, settings

from tests.equivalence.random_programs import Case, cases, check_case

# An example costs a second, so the short profile does not look for a smaller one that fails too.
SHORT = {"max_examples": 40, "phases": [Phase.explicit, Phase.generate]}
PROFILE = {} if os.environ.get("STEPGRAPH_HYPOTHESIS") else SHORT


@settings(suppress_health_check=[HealthCheck.too_slow], **PROFILE)
@given(case=cases())
def test_steps_of_a_random_module_are_those_of_plain_pytorch(case: Case):
    check_case(case)
