"""A bug for each pass, of the pass's own kind; and steps in which each pass has something to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from stepgraph.operators.norms import SUM_OF_SQUARES
from stepgraph.operators.updates import FUSED_ADAM, UPDATE
from stepgraph.pipeline import ROADS
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import Precision
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.torch_internals import UNSAFE_VIEW, WAIT
from tests.support import mlp, regression_batch

aten = torch.ops.aten
PASSES = {step.name: step for road in ROADS.values() for step in road}
Bug = Callable[..., Program]


# ------------------------------------------------------------------------------------------ cases


class Parts(nn.Module):
    """Aliases, empty operands, rows picked by counting, dropout, a causal mask, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x, y):
        h = self.norm(torch.tanh(self.first(x)))
        h = h + 0.1 * h.detach()
        h = torch.cat([h[:, :0], h[:, :4], h[:, 4:]], 1)
        rows = torch.arange(len(x))[:, None]
        h = h + h[rows, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])]
        q = h.view(len(x), 1, 4, 2)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        h = h + nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).flatten(1)
        return nn.functional.cross_entropy(self.last(nn.functional.dropout(h, 0.25)), y)


class Classes(nn.Module):
    """A head over classes that tensor parallelism shards, and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.hidden = nn.Linear(6, 12)
        self.out = nn.Linear(12, 6)
        self.head = nn.Linear(6, 8, bias=False)

    def forward(self, x, y):
        h = self.table(x)
        h = h + self.out(torch.tanh(self.hidden(h)))
        return nn.functional.cross_entropy(self.head(h), y)


class Words(nn.Module):
    """A head whose logits take more than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(torch.tanh(self.table(x))), y)


def words() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Words(), (torch.randint(0, 8, (96,)), torch.randint(0, 64, (96,)))


def parts(rows: int = 8) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Parts(), (torch.randn(rows, 6), torch.randint(0, 5, (rows,)))


def classes(rows: int = 8) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Classes(), (torch.randint(0, 8, (rows,)), torch.randint(0, 8, (rows,)))


def weighted() -> tuple[nn.Module, Any]:
    return mlp("count"), regression_batch()


def averaged_loss() -> tuple[nn.Module, Any]:
    return mlp("mean"), regression_batch()


def on(mesh: str, plan: str, **policies: Any) -> dict[str, Any]:
    return {"mesh": mesh, "plan": preset_plan(plan, parse_mesh(mesh), **policies)}


CASES: dict[str, tuple[Callable, dict[str, Any]]] = {
    "parts": (parts, on("dp=2", "zero3")),
    "parts in micro-batches": (parts, on("dp=2", "zero3") | {"micro_batches": 2}),
    "averaged in micro-batches": (averaged_loss, on("dp=2", "zero3") | {"micro_batches": 2}),
    "counted in micro-batches": (weighted, on("dp=2", "zero1") | {"micro_batches": 2}),
    "clipped": (weighted, on("dp=2", "zero3", memory="full") | {"max_grad_norm": 0.01}),
    "in two types": (
        weighted,
        on("dp=2", "zero3") | {"precision": Precision(torch.bfloat16, torch.float32)},
    ),
    "classes": (classes, on("dp=2,tp=2", "tp+zero3")),
    "two dimensions": (weighted, on("replicate=2,shard=2", "hsdp")),
    "in pieces": (words, on("dp=2", "zero3", memory="budget:56KiB", device="h100")),
    "offloaded": (parts, on("dp=2", "zero3", memory="*=offload")),
    "states away": (parts, on("dp=2", "zero3", memory="optimizer=offload")),
    "searched": (classes, on("dp=2", "auto", device="h100")),
}


@dataclass(frozen=True)
class Planted:
    """A bug, the case in which its pass acts, and the entry point whose programs are checked."""

    case: str
    bug: Bug
    entry: str = "step"


# ------------------------------------------------------------------------------------- kinds of bug


def after(change: Callable[[Program], Any]) -> Callable[[str], Bug]:
    """The pass, and a change of what it made."""

    def of(name: str) -> Bug:
        def bug(program: Program, **arguments: Any) -> Program:
            program = PASSES[name].rewrite(program, **arguments)
            change(program)
            return program

        return bug

    return of


def with_other(**others: Callable[[Any], Any]) -> Callable[[str], Bug]:
    """The pass with other arguments than it was given."""

    def of(name: str) -> Bug:
        def bug(program: Program, **arguments: Any) -> Program:
            changed = {key: change(arguments[key]) for key, change in others.items()}
            return PASSES[name].rewrite(program, **(arguments | changed))

        return bug

    return of


def first(program: Program, wanted: Callable[[fx.Node], bool]) -> fx.Node | None:
    return next((node for node in program.operations() if wanted(node)), None)


def scaled(target: Any, factor: float = 1.5, last: bool = False) -> Callable[[Program], None]:
    """A lost or wrong scale: what the first (or last) such operation gives is multiplied."""

    def change(program: Program) -> None:
        found = [n for n in program.operations() if n.target is target and n.users]
        if not found:
            return
        node = found[-1 if last else 0]
        emit = Builder(program, node.meta["phase"], node.next)
        new = emit(aten.mul.Scalar, node, factor)
        new.meta |= {"name": f"{node.meta['name']}/bug", "placements": node.meta.get("placements")}
        for user in list(node.users):
            if user is not new:
                user.replace_input_with(node, new)

    return change


def argument(target: Any, position: int, value: Callable[[Any], Any]) -> Callable[[Program], None]:
    """A wrong number: an argument of the first such operation."""

    def change(program: Program) -> None:
        node = first(program, lambda n: n.target is target)
        if node is not None:
            args = list(node.args)
            args[position] = value(args[position])
            node.args = tuple(args)

    return change


def stale(role: type, of: type) -> Callable[[Program], None]:
    """A stale value: an output is what an input was."""

    def change(program: Program) -> None:
        results = list(program.results)
        for index, output in enumerate(program.outputs):
            if isinstance(output, role) and of(output.name) in program.inputs:
                results[index] = program.input_node(of(output.name))
                break
        program.graph.output_node().args = (tuple(results),)

    return change


def exchange(wanted: Callable[[fx.Node], bool]) -> Callable[[Program], None]:
    """Wrong places: two like operations have each other's arguments behind the first."""

    def change(program: Program) -> None:
        nodes = [n for n in program.operations() if wanted(n)]
        for one in nodes:
            for other in nodes:
                alike = one.args[0] is other.args[0] and one.args[1:] != other.args[1:]
                same = one.meta["val"].shape == other.meta["val"].shape
                if alike and same:
                    one.args, other.args = other.args, one.args
                    return

    return change


def recomputed(program: Program) -> None:
    node = first(program, lambda n: "recomputed_from" in n.meta and n.target is aten.tanh.default)
    if node is not None:
        node.target = aten.sin.default


def mixed_up(program: Program) -> None:
    """What has come back is another value of the same kind."""
    waits = [n for n in program.operations("backward") if n.target is WAIT_COPY]
    kinds = [(n.meta["val"].shape, n.meta["val"].dtype) for n in waits]
    for i, (one, kind) in enumerate(zip(waits, kinds, strict=True)):
        for other in (n for n, k in zip(waits[:i], kinds, strict=False) if k == kind):
            for reader in list(one.users):
                reader.replace_input_with(one, other)
            return


def kept_old(program: Program) -> None:
    """What goes back to the host is what came from there."""
    sent = first(program, lambda n: n.target is TO_HOST)
    came = first(program, lambda n: n.target is WAIT_COPY and n.args[0].target is TO_DEVICE)
    if sent is not None and came is not None:
        wait = next(iter(sent.users))
        same = [n for n in program.operations() if n.target is WAIT_COPY]
        state = next(n for n in same if n.args[1].op == "placeholder" and _alike(n, sent))
        sent.args, wait.args = (state,), (sent, state)


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return (one.shape, one.dtype) == (two.shape, two.dtype)


def early(program: Program) -> None:
    """An update stands before the gradient that it reads."""
    names = (roles.NewParam,)
    rows = zip(program.outputs, program.results, strict=True)
    node = next(
        (n for role, n in rows if isinstance(role, names) and n.op == "call_function"), None
    )
    if node is not None:
        next(program.operations()).prepend(node)


def unawaited(program: Program) -> None:
    """A reader does not wait for its collective."""
    wait = first(program, lambda n: n.target is WAIT)
    if wait is not None:
        reader = next(iter(wait.users))
        reader.replace_input_with(wait, wait.args[0])


def written_first(program: Program) -> None:
    """State is overwritten before its last reader."""
    write = [n for n in program.operations() if n.target is aten.copy_.default]
    for node in write:
        readers = [u for u in node.args[0].users if u is not node]
        source = node.args[1]
        if readers and source.op == "call_function":
            point = min(readers)
            emit_before = min([point, node])
            clone = program.graph.call_function
            with program.graph.inserting_before(emit_before):
                new = clone(aten.zero_.default, (node.args[0],))
            new.meta = dict(node.meta) | {"name": "bug/write"}
            return


def other_dimension(program: Program) -> None:
    node = first(program, is_collective)
    if node is not None and program.mesh is not None:
        names = [name for name in program.mesh.names if name != node.args[-1]]
        node.args = (*node.args[:-1], *(names or ["nowhere"]))


def averaged(program: Program) -> None:
    """A pending sum is resolved into something else."""
    for node in program.operations():
        if is_collective(node) and "sum" in node.args:
            node.args = tuple("max" if a == "sum" else a for a in node.args)
            return


def other_coordinate(position: int) -> Callable[[Program], None]:
    def shift(value: Any) -> Any:
        return [value[0] + 1, *value[1:]] if isinstance(value, (list, tuple)) else value + 1

    return argument(RANDOM, position, shift)


def other_mask(program: Program) -> None:
    for node in program.operations():
        if "attention" in str(node.target):
            node.args = tuple(not a if a is True else a for a in node.args)


def other_scale(program: Program) -> None:
    for node in program.operations():
        if "scaled_dot_product" in str(node.target):
            node.kwargs = {**node.kwargs, "scale": 2 * node.kwargs["scale"]}


def reversed_operands(program: Program) -> None:
    for node in program.operations():
        if node.target is aten.cat.default and len(node.args[0]) == 2:
            one, other = node.args[0]
            if one.meta["val"].shape == other.meta["val"].shape:
                node.args = ([other, one], *node.args[1:])
                return


def other_view(program: Program) -> None:
    """A reader of a view gets another view of it."""
    views = (aten.t.default, aten.view.default, UNSAFE_VIEW)
    scaled_views = first(program, lambda n: n.target in views and n.meta["val"].dim() > 1)
    if scaled_views is not None:
        scaled(scaled_views.target)(program)


def other_decay(program: Program) -> None:
    """torch's kernel for another kind of weight decay."""
    for node in program.operations():
        if node.target is FUSED_ADAM:
            node.args = (*node.args[:-2], not node.args[-2], node.args[-1])


def counted_often(program: Program) -> None:
    """Tensors whose squares are summed a thousand times."""
    for node in program.operations():
        if node.target is SUM_OF_SQUARES:
            node.args = (1000 * list(node.args[0]), *node.args[1:])


PLANTED: dict[str, Planted] = {
    name: Planted(case, kind(name), *entry)
    for name, case, kind, *entry in (
        ("key_random_operations", "parts", after(other_coordinate(2))),
        ("drop_identities", "parts", after(scaled(aten.tanh.default))),
        ("drop_empty_cat_operands", "parts", after(reversed_operands)),
        ("index_rows_in_place", "parts", after(scaled(aten.index_select.default))),
        ("recognise_masks", "parts", after(other_mask)),
        ("cast_parameters", "in two types", after(scaled(aten._to_copy.default))),
        ("accumulate_gradients", "counted in micro-batches", after(scaled(aten.add.Tensor, last=True))),
        ("start_backward_at_one", "parts", after(argument(aten.full.default, 1, lambda x: 2.0))),
        ("finish_accumulation", "averaged in micro-batches", with_other(micro_batches=lambda n: n + 1)),
        ("reduce_gradients_in", "in two types", after(scaled(aten._to_copy.default, last=True))),
        ("clip_gradients", "clipped", after(scaled(aten.clamp.default))),
        ("update_parameters", "clipped", after(stale(roles.NewParam, roles.Param))),
        ("spell_out_log_softmax", "classes", after(scaled(aten.log.default))),
        ("spell_out_norms", "parts", after(scaled(aten.rsqrt.default))),
        ("copy_views", "searched", after(other_view)),
        ("draw_by_global_row", "parts in micro-batches", after(other_coordinate(5))),
        ("place_values", "clipped", after(averaged)),
        ("compare_with_classes", "parts", after(scaled(aten.where.self, last=True))),
        ("compute_logits_in_pieces", "in pieces", after(scaled(aten.addmm.default, last=True))),
        ("recompute_in_backward", "clipped", after(recomputed)),
        ("offload_to_host", "offloaded", after(mixed_up)),
        ("offload_states", "states away", after(kept_old)),
        ("merge_small_collectives", "classes", after(exchange(lambda n: n.target is aten.slice.Tensor))),
        ("update_early", "clipped", after(early)),
        ("delay_waits", "clipped", after(unawaited)),
        ("bind_to_rank", "parts", with_other(rank=lambda rank: 1 - rank)),
        ("move_to_target", "parts", after(scaled(aten.tanh.default))),
        ("choose_attention_kernels", "parts", after(other_scale)),
        ("write_state_in_place", "clipped", after(written_first)),
        ("add_up_in_place", "in pieces", after(scaled(aten.addmm_.default, last=True))),
        ("compute_pieces_in_place", "in pieces", after(scaled(aten.mul_.Tensor, last=True))),
        ("fuse_square_sums", "clipped", after(counted_often)),
        ("fuse_updates", "clipped", after(other_decay)),
        ("communicate_between_layers", "clipped", after(written_first)),
        ("name_groups", "two dimensions", after(other_dimension)),
    )
}  # fmt: skip


# In these programs a pass finds nothing of its kind to do; a bug in it may strike them all the same.
BESIDE_THE_PASS = {
    "step": (),
    "accumulate": (
        "compute_logits_in_pieces", "copy_views", "offload_states", "update_early", "add_up_in_place",
        "compute_pieces_in_place", "fuse_square_sums", "fuse_updates",
    ),
    "evaluate": (
        "compare_with_classes", "compute_logits_in_pieces", "copy_views", "draw_by_global_row",
        "recompute_in_backward", "offload_to_host", "offload_states", "update_early",
        "write_state_in_place",
        "add_up_in_place", "compute_pieces_in_place", "fuse_square_sums", "fuse_updates",
        "communicate_between_layers",
    ),
    "gradients": (
        "compute_logits_in_pieces", "draw_by_global_row", "offload_states", "update_early",
        "write_state_in_place",
        "add_up_in_place", "compute_pieces_in_place", "fuse_square_sums", "fuse_updates",
        "communicate_between_layers",
    ),
    "update": (
        "spell_out_log_softmax", "spell_out_norms", "copy_views", "draw_by_global_row", "place_values",
        "compare_with_classes", "compute_logits_in_pieces", "recompute_in_backward", "offload_to_host",
        "merge_small_collectives", "bind_to_rank", "move_to_target", "choose_attention_kernels",
        "name_groups", "add_up_in_place", "compute_pieces_in_place",
    ),
}  # fmt: skip


def struck(program: Program) -> None:
    """Another operation: of the last one that can be mistaken."""
    mistaken = {aten.tanh.default: aten.sin.default, aten.add.Tensor: aten.sub.Tensor}
    mistaken |= {aten.mul.Tensor: aten.add.Tensor, aten.sqrt.default: aten.abs.default}
    node = next(n for n in reversed(list(program.operations())) if n.target in {*mistaken, UPDATE})
    if node.target is UPDATE:
        text = node.args[2].replace("aten.sqrt.default", "aten.abs.default")
        node.args = (*node.args[:2], text, *node.args[3:])
    else:
        node.target = mistaken[node.target]


# Passes of the road graph by graph: bugs, planted where a module with a graph break runs on ranks.
PLANTED_IN_GRAPHS: dict[str, Bug] = {
    "name_mesh_dims": after(scaled(aten.tanh.default))("name_mesh_dims"),
    "key_random_operations": after(other_coordinate(2))("key_random_operations"),
    "draw_seed": after(argument(aten.add.Scalar, 1, lambda word: word + 1))("draw_seed"),
    "place_markers": after(argument(aten.div.Scalar, 1, lambda ranks: 2 * ranks))("place_markers"),
    "sum_over_ranks": after(averaged)("sum_over_ranks"),
    "compute_logits_in_pieces": after(scaled(aten.tanh.default))("compute_logits_in_pieces"),
    "recompute_in_backward": after(scaled(aten.tanh.default))("recompute_in_backward"),
    "offload_to_host": after(scaled(aten.tanh.default))("offload_to_host"),
    "offload_states": after(scaled(aten.tanh.default))("offload_states"),
    "merge_small_collectives": after(unawaited)("merge_small_collectives"),
    "update_early": after(scaled(aten.tanh.default))("update_early"),
    "delay_waits": after(unawaited)("delay_waits"),
    "bind_to_rank": after(scaled(aten.tanh.default))("bind_to_rank"),
    "choose_attention_kernels": after(scaled(aten.tanh.default))("choose_attention_kernels"),
}
