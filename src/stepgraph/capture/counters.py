"""Which parameters' step counters are one tensor.

torch keeps a counter (Adam's ``step``) for every parameter. Parameters that have been updated together
at every step have equal counters; such a cohort shares one, so that what depends on counters and
numbers alone is computed once. A program that updates only some of a cohort divides it.
"""

from collections.abc import Callable, Hashable, Mapping

import torch

from stepgraph.capture.update_rules import FunctionalOptimizer, UpdateRule


class SharedCounters:
    """The cohorts of one run.

    Args:
        divided: called with an old cohort's label and those of the cohorts that replace it, each of which
            goes on from the old one's counters.
    """

    def __init__(self, divided: Callable[[str, list[str]], None] = lambda old, new: None) -> None:
        self.version = 0  # grows whenever programs may hold counters that are no longer shared
        self._divided = divided
        self._members: dict[str, list[str]] = {}
        self._cohort_of: dict[str, str] = {}
        self._group_of: dict[str, int] = {}
        self._shared: dict[str, frozenset[str]] = {}
        self._made: dict[int, int] = {}

    def owner(self, name: str, key: str) -> str:
        """Under what a parameter's state is kept: its cohort's label, or its own name."""
        return self._cohort_of[name] if key in self._shared.get(name, ()) else name

    def members(self, owner: str) -> list[str]:
        """The parameters that keep states under a label or name."""
        return self._members.get(owner, [owner])

    def cover(
        self,
        optimizer: FunctionalOptimizer,
        shapes: Mapping[str, torch.Tensor],
        present: Mapping[tuple[str, str], torch.Tensor],
    ) -> None:
        """Takes in a program that updates every parameter of ``optimizer``, and no other.

        Args:
            shapes: the parameters.
            present: what the torch optimizer holds, by parameter and key: parameters that are new here
                are counted together where these agree.
        """
        new: dict[tuple, list[str]] = {}
        for name, group in optimizer.group_of.items():
            if name in self._cohort_of:
                continue
            shared = _counters(optimizer.rule(name, shapes[name]), shapes[name])
            self._shared[name], self._group_of[name] = shared, group
            held = {key: float(present[name, key]) for key in shared if (name, key) in present}
            stepped = any(owner == name for owner, _ in present)
            new.setdefault((group, stepped, *sorted(held.items())), []).append(name)
        self.divide(lambda name: name in optimizer.group_of)
        for key, names in new.items():
            self._add(key[0], names)

    def divide(self, kind: Callable[[str], Hashable]) -> None:
        """Parts the members of each cohort that are not of one kind."""
        for label, names in list(self._members.items()):
            parts: dict[Hashable, list[str]] = {}
            for name in names:
                parts.setdefault(kind(name), []).append(name)
            if len(parts) > 1:
                del self._members[label]
                made = [self._add(self._group_of[part[0]], part) for part in parts.values()]
                self._divided(label, made)
                self.version += 1

    def _add(self, group: int, names: list[str]) -> str:
        made = self._made.get(group, 0)
        self._made[group] = made + 1
        label = f"group{group}.{made}" if made else f"group{group}"
        self._members[label] = names
        self._cohort_of |= dict.fromkeys(names, label)
        return label


def _counters(rule: UpdateRule, parameter: torch.Tensor) -> frozenset[str]:
    """0-dim states whose new value reads neither the parameter nor the gradient."""
    if not parameter.dim():  # no telling a number of its own from one of the group
        return frozenset()
    nodes = list(rule.graph.graph.nodes)
    depends = set(nodes[:2])
    for node in nodes[2:]:
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    new_values = dict(zip(rule.states, nodes[-1].args[0][1:], strict=True))
    return frozenset(
        key
        for key, spec in rule.states.items()
        if spec.shape == () and new_values[key] not in depends
    )
