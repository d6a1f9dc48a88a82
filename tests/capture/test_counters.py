"""Which parameters' step counters are one tensor."""

from __future__ import annotations

import torch

from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.optimizer import functionalize_optimizer
from stepgraph.capture.update_rules import FunctionalOptimizer
from tests.support import adamw, mlp

FIRST, BIAS, SECOND = "first.weight", "first.bias", "second.weight"


class Cohorts:
    """SharedCounters over the parameters of a model, and what it said was divided."""

    def __init__(self, scaled: bool = False) -> None:
        self.model = mlp(scaled=scaled)
        self.named = dict(self.model.named_parameters())
        self.all = functionalize_optimizer(adamw(self.model), self.named)
        self.divided: list[tuple[str, list[str]]] = []
        self.counters = SharedCounters(lambda old, new: self.divided.append((old, new)))

    def cover(self, *names: str, present=None) -> list[str]:
        group_of = {n: g for n, g in self.all.group_of.items() if n in names or not names}
        self.counters.cover(
            FunctionalOptimizer(group_of, self.all.rules), self.named, present or {}
        )
        return self.owners()

    def owners(self) -> list[str]:
        return [self.counters.owner(name, "step") for name in (FIRST, BIAS, SECOND)]


def test_parameters_of_a_group_share_one_counter():
    assert Cohorts().cover() == ["group0"] * 3


def test_a_program_that_updates_some_divides_the_cohort():
    cohorts = Cohorts()
    cohorts.cover()
    before = cohorts.counters.version
    first, bias, second = cohorts.cover(FIRST, BIAS)
    assert first == bias != second
    assert cohorts.divided == [("group0", [first, second])]
    assert cohorts.counters.version > before


def test_a_program_that_updates_more_has_two_cohorts():
    cohorts = Cohorts()
    cohorts.cover(FIRST, BIAS)
    assert cohorts.cover() == ["group0", "group0", "group0.1"]
    assert cohorts.divided == [] and cohorts.counters.members("group0.1") == [SECOND]


def test_a_label_is_never_used_twice():
    cohorts = Cohorts()
    seen = [{*cohorts.cover()}, {*cohorts.cover(FIRST, BIAS)}, {*cohorts.cover(FIRST)}]
    assert [len(labels) for labels in seen] == [1, 2, 3]
    assert seen[0].isdisjoint(seen[1]) and len(seen[1] & seen[2]) == 1


def test_what_an_optimizer_holds_already_tells_them_apart():
    three = {(name, "step"): torch.tensor(3.0) for name in (FIRST, BIAS, SECOND)}
    assert Cohorts().cover(present=three) == ["group0"] * 3
    first, bias, second = Cohorts().cover(present=three | {(FIRST, "step"): torch.tensor(2.0)})
    assert first != bias == second
    first, bias, second = Cohorts().cover(present={(FIRST, "step"): torch.tensor(3.0)})
    assert first != bias == second


def test_a_number_of_its_own_is_not_shared():
    cohorts = Cohorts(scaled=True)
    cohorts.cover()
    assert cohorts.counters.owner("scale", "step") == "scale"
    assert cohorts.counters.owner(FIRST, "exp_avg") == FIRST
