"""Models with heads of many kinds, and their programs with logits in pieces."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from stepgraph.analysis.row_regions import find_regions
from stepgraph.memory.passes.compute_logits_in_pieces import compute_logits_in_pieces
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.program.driver import PassDriver
from stepgraph.program.invariants import check_invariants
from stepgraph.program.metadata import meta
from stepgraph.runtime.ranks import parse_mesh
from tests.support import programs_of, values

WORDS, WIDTH, ROWS, LENGTH = 40, 8, 4, 6


class Words(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.table, self.hidden = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=head == "smoothed")
        if head == "tied":
            self.head.weight = self.table.weight
        self.kind = head

    def forward(self, tokens, labels):
        kind, hidden = self.kind, torch.tanh(self.hidden(self.table(tokens)))
        logits = self.head(hidden)
        if kind == "capped":
            logits = 5 * torch.tanh(logits.float() / 5)
        if kind in (
            "there and back",
            "joined",
        ):  # what a compiler may take for the logits themselves
            same = torch.cat([logits], -1) if kind == "joined" else logits.double().float()
            loss = F.cross_entropy((same + torch.sin(logits)).flatten(0, 1), labels.flatten())
            return loss + 0.01 * (torch.logsumexp(logits, -1) ** 2).mean()
        if kind == "own":
            kept = (labels >= 0).float()
            log = torch.log_softmax(logits, -1)
            losses = -log.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return (losses * kept).sum() / kept.sum()
        if kind == "taught":
            teacher = torch.softmax(self.head(torch.sin(hidden)).detach(), -1)
            return F.kl_div(torch.log_softmax(logits, -1), teacher, reduction="sum")
        if kind == "over the batch":  # each word's probability over all tokens
            return torch.log_softmax(logits.flatten(0, 1), 0).square().mean()
        if kind == "met again":  # a sum over rows is read by rows
            rows = hidden.flatten(0, 1)
            with torch.no_grad():
                shares = torch.softmax(logits.flatten(0, 1), -1)
                again = shares @ (shares.t() @ rows)
            return (rows - again).square().mean()
        if kind == "two-valued":  # compared with a number that is made of the logits' type
            wanted = F.one_hot(labels.clamp(min=0), WORDS).float()
            return F.binary_cross_entropy_with_logits(logits, wanted)
        if kind == "words first":
            return F.cross_entropy(logits.transpose(1, 2), labels)
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            label_smoothing=0.1 if kind == "smoothed" else 0.0,
            reduction="none" if kind == "focal" else "mean",
        )
        if kind == "focal":
            return ((1 - torch.exp(-losses)) ** 2 * losses).mean()
        if kind == "z-loss":
            return losses + 0.01 * (torch.logsumexp(logits, -1) ** 2).mean()
        if kind == "added up":
            return losses + logits.sum(0).square().mean()
        return losses**2 if kind == "squared" else losses


def batch(rows=ROWS):
    random = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, WORDS, (rows, LENGTH), generator=random) for _ in range(2))
    labels[0, :3] = -100
    return tokens, labels


@functools.cache
def placed(head, mesh="dp=1", plan="ddp", micro_batches=1, dtype=None, name="step"):
    """Inputs, and the program that the pass is handed."""
    torch.manual_seed(0)
    model = Words(head)
    step = StepSettings(None, micro_batches, precision=Precision(dtype))
    seen = []

    def observe(found, before, after, arguments):
        if found.name == "compute_logits_in_pieces" and before.name == name:
            seen.append(before)

    driver = PassDriver(invariants=True, observe=observe)
    asked = preset_plan(plan, parse_mesh(mesh), step=step)
    programs_of(model, batch(ROWS // micro_batches), asked, None, driver)
    return values(model, batch(), settings=step), seen[0]


def divided(program, pieces):
    """The program with every head in so many pieces, and their number."""
    regions = find_regions(program, 0)
    names = {meta(region.product)["name"]: pieces for region in regions}
    after = compute_logits_in_pieces(program.copy(), MemoryDecision("none", pieces=names))
    check_invariants(after)
    return after, len(names)
