"""The blocks of a Program, of which a solver decides one by one how much each keeps.

Blocks that do the same, with the same of it under the code's own checkpoints, are of one kind and have the
same levels: a level is a set of positions in a block whose results are kept, so that it means the same for
each of them, however many there are.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from stepgraph.analysis.blocks import Block, find_blocks, letter
from stepgraph.cost.work import size_in_bytes
from stepgraph.memory import regions_of_code
from stepgraph.memory.by_policy import gathered_values
from stepgraph.memory.regions_of_code import not_crossing, sent_to_host
from stepgraph.memory.saved import is_behind, offloaded, storage_of
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program

GATHERED_AGAIN = -1


@dataclass(frozen=True)
class Level:
    """How much a block keeps.

    Attributes:
        name: for people.
        kept: by kind of block, positions whose results are kept while the rest is computed again; None: all
            is kept.
        gathered: parameters that were gathered for the forward stay so for the backward.
        communicates: what ranks added up or exchanged is no exception: it is communicated twice.
        offloads: what is kept of what a block computes waits on the host.
    """

    name: str
    kept: tuple[frozenset[int] | None, ...]
    gathered: bool = False
    communicates: bool = False
    offloads: bool = False


class Blocks:
    """The blocks of a Program, in order; the whole forward is one where none repeats.

    Args:
        gather_again: parameters that were gathered are gathered again for the backward.
        named: blocks as lists of stable names, where they are known: those that are whole are taken.
    """

    def __init__(
        self, program: Program, gather_again: bool, named: Sequence[Sequence[str]] | None = None
    ) -> None:
        self.program = program
        self.nodes = list(program.operations(FORWARD))
        if named is None:
            found = find_blocks(program) or [Block(0, len(self.nodes))]
            self.blocks = [self.nodes[block.start : block.stop] for block in found]
        else:
            by_name = {meta(node)["name"]: node for node in self.nodes}
            whole = [names for names in named if all(name in by_name for name in names)]
            self.blocks = [[by_name[name] for name in names] for names in whole]
        self.code = regions_of_code.find(self.nodes)
        self.taken = {node for region in self.code for node in region}
        numbers: dict[tuple, int] = {}
        # What a region of the code's own recomputes is not the solver's to decide.
        texts = [tuple((letter(n), n in self.taken) for n in block) for block in self.blocks]
        self.kinds = [numbers.setdefault(text, len(numbers)) for text in texts]
        self.again = gathered_values(program, gather_again)
        kept_else = set(gathered_values(program, False))
        self._parameters = {name for name in self.again if name not in kept_else}
        self._found: dict[tuple[int, frozenset[int], bool], list[str]] = {}
        self._own = self._of_code()

    @property
    def names(self) -> list[list[str]]:
        """Blocks as lists of stable names."""
        return [[meta(node)["name"] for node in block] for block in self.blocks]

    @property
    def gathers(self) -> bool:
        """Whether a block has parameters that are gathered again."""
        inside = (meta(node)["name"] for block in self.blocks for node in block)
        return not self._parameters.isdisjoint(inside)

    def gathered_bytes(self, number: int) -> int:
        """What a block keeps where its parameters are gathered once."""
        chain = [node for node in self.blocks[number] if meta(node)["name"] in self._parameters]
        read = [node for node in chain if any(map(is_behind, node.users))]
        return sum(size_in_bytes(meta(s)["val"]) for s in {storage_of(node) for node in read})

    def first_of(self, kind: int) -> int:
        """A block of a kind."""
        return self.kinds.index(kind)

    def decision(self, policy: str, levels: Sequence[Level]) -> MemoryDecision:
        """What is recomputed where each block has a level."""
        recompute = dict(self._own)
        stays: set[str] = set()
        away = sent_to_host(self.nodes)
        for number, (block, level) in enumerate(zip(self.blocks, levels, strict=True)):
            kept = level.kept[self.kinds[number]]
            if kept is not None:
                names = self.dropped(number, kept, level.communicates)
                recompute |= dict.fromkeys(names, len(self.code) + number)
            if level.offloads:
                away += block
            if level.gathered:
                stays |= {meta(node)["name"] for node in block} & self._parameters
        for name in self.again:
            if name not in stays:
                recompute.setdefault(name, GATHERED_AGAIN)
        offload = offloaded(self.program, recompute, away)[0] if away else ()
        return MemoryDecision(policy, recompute, offload=offload or None)

    def dropped(self, number: int, kept: frozenset[int], communicates: bool = False) -> list[str]:
        """Names of what a block computes again, where it keeps these positions."""
        key = (number, kept, communicates)
        if key not in self._found:
            block = self.blocks[number]
            inside = [node for node in block if node not in self.taken]
            stays = {block[position] for position in kept} - self.taken
            if communicates:  # parameters are not activations
                stays |= {node for node in inside if meta(node)["name"] in self._parameters}
            dropped = not_crossing(inside, self.program, stays, communicates)
            self._found[key] = [meta(node)["name"] for node in dropped]
        return self._found[key]

    def free(self, number: int) -> set[fx.Node]:
        """Values that are there in the backward whatever a block keeps: inputs, what others recompute."""
        inside = {*self.blocks[number]}
        again = {*self.again, *self._own}
        sources = {source for node in inside for source in node.all_input_nodes}
        return {
            node
            for node in inside | sources
            if node.op != "call_function" or meta(node)["name"] in again
        }

    def _of_code(self) -> dict[str, int]:
        """What the user's own checkpoint regions recompute, whatever blocks keep."""
        found: dict[str, int] = {}
        for number, region in enumerate(self.code):
            for node in not_crossing(region, self.program):
                found[meta(node)["name"]] = number
        return found


def positions(block: Sequence[fx.Node], kept: Collection[fx.Node]) -> frozenset[int]:
    """Where nodes stand in a block."""
    return frozenset(i for i, node in enumerate(block) if node in kept)
