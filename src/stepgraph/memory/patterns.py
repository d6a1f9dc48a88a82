"""Policies for parts of a model: ``layers.*.mlp=recompute,*.attention=save,layers.*=offload``.

What is offloaded is what the backward reads, or recomputes from, of what a module computes. ``optimizer``
means the optimizer's states (``optimizer=offload`` lets them wait on the host between updates), but for a
model that has a module of that name.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from stepgraph.errors import UsageError
from stepgraph.program.metadata import meta

RECOMPUTE, SAVE, OFFLOAD = "recompute", "save", "offload"
ACTIONS = (RECOMPUTE, SAVE, OFFLOAD)
OPTIMIZER = "optimizer"  # the pattern that stands for its states


def as_text(memory: Any) -> Any:
    """A table of patterns as the text of a policy; anything else as it is.

    Raises:
        UsageError: a pattern or an action that is none.
    """
    if not isinstance(memory, Mapping):
        return memory
    if not memory:
        return "none"
    if any("," in str(pattern) for pattern in memory):
        raise UsageError("a memory pattern names modules, and holds no comma")
    text = ",".join(f"{pattern}={action}" for pattern, action in memory.items())
    parse_patterns(text)
    return text


def are_patterns(policy: str) -> bool:
    """Whether a policy is made of patterns."""
    return "=" in policy


def parse_patterns(text: str) -> dict[str, str]:
    """``{"layers.*.mlp": "recompute"}``.

    Raises:
        UsageError: an action that is none, no pattern, or one twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        pattern, _, action = (word.strip() for word in part.rpartition("="))
        if action not in ACTIONS or not pattern or pattern in found:
            raise UsageError(
                f"memory pattern {part!r} cannot be used",
                why="each names modules once, and what becomes of what they compute",
                do=f"write MODULE=ACTION, such as 'layers.*.mlp=recompute'; actions: {', '.join(ACTIONS)}",
            )
        found[pattern] = action
    return found


class Parts:
    """Operations of a forward by the patterns that name their modules; the first that does counts.

    A pattern names modules by path, ``*`` standing for any text, with all that is inside them; the path may
    start anywhere (``layers.*.mlp`` is ``model.layers.0.mlp``, too).
    """

    def __init__(self, patterns: Mapping[str, str], nodes: Sequence[fx.Node]) -> None:
        self.regions: dict[str, list[fx.Node]] = {}  # by path of a module that is recomputed
        self.saved: set[fx.Node] = set()
        self.offloaded: list[fx.Node] = []
        met: set[str] = set()
        paths = {meta(node).get("module", "") for node in nodes}
        fits = {path: _fitting(patterns, path) for path in paths}
        for node in nodes:
            found = fits[meta(node).get("module", "")]
            if not found:
                continue
            pattern, path = next(iter(found.items()))
            met |= found.keys()
            if patterns[pattern] == SAVE:
                self.saved.add(node)
            elif patterns[pattern] == OFFLOAD:
                self.offloaded.append(node)
            else:
                self.regions.setdefault(path, []).append(node)
        self.notes = tuple(_missed(p, sorted(paths)) for p in patterns if p not in met)


def _fitting(patterns: Mapping[str, str], path: str) -> dict[str, str]:
    """Patterns that a path, or one above it, fits; and that path."""
    found = {}
    for pattern in patterns:
        text = re.escape(pattern).replace(r"\*", ".*?")
        if match := re.match(rf"((?:.*?\.)?{text})(?:\.|$)", path):
            found[pattern] = match[1]
    return found


def _missed(pattern: str, paths: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3)
    hint = f"; near misses: {', '.join(close)}" if close else ""
    return f"memory: no operations of this program fit the pattern {pattern!r}{hint}"
