"""The ranks of a run: mesh strings, the process group, the device mesh, and what ranks tell each other."""

import contextlib
import json
import logging
import os
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepgraph import torch_internals
from stepgraph.errors import BatchError, MeshError
from stepgraph.lowering.graphs.captured import release_all
from stepgraph.planning.target import Target, usual_target
from stepgraph.program.layout import MeshShape, data_mesh

log = logging.getLogger("stepgraph")

PATIENCE = 30.0  # seconds for which a rank waits for others without a word
LIMIT_SECONDS = 30 * 60.0  # as long as gloo waits for a rank
_POLL_SECONDS = 0.002
_REGISTERS = "NCCL_GRAPH_REGISTER"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def parse_mesh(text: str) -> MeshShape:
    """``"dp=4,tp=2"`` as a MeshShape.

    Raises:
        MeshError: not of that form, a size below one, a name that occurs twice or has no role.
    """
    dims: list[tuple[str, int]] = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name.isidentifier() or not size.isdigit() or int(size) < 1:
            raise MeshError(
                f"mesh {text!r} is not understood at {part.strip()!r}",
                do="write names and sizes: 'dp=4' or 'dp=4,tp=2'",
            )
        dims.append((name, int(size)))
    if len({name for name, _ in dims}) != len(dims):
        raise MeshError(f"mesh {text!r} names a dimension twice")
    return MeshShape(tuple(dims))


@dataclass
class Ranks:
    """This process's place among the ranks.

    ``groups`` are the names of its process groups, one per mesh dimension (empty for one process).
    ``owns_group``: the process group was made here and must be destroyed here.
    """

    shape: MeshShape
    device_mesh: DeviceMesh
    rank: int
    groups: dict[str, str]
    owns_group: bool

    @property
    def target(self) -> Target:
        """What this rank's programs run on."""
        return usual_target(self.device_mesh.device_type)


def join_ranks(mesh: str | DeviceMesh | None, device: torch.device) -> Ranks:
    """Joins the launched ranks, or stands alone where none were launched.

    Args:
        mesh: names and sizes, a DeviceMesh, or None for every rank on ``dp``.
        device: of the model; says which backend communicates.

    Raises:
        MeshError: the mesh does not multiply to the number of ranks.
    """
    if isinstance(mesh, str):
        parse_mesh(mesh)  # a bad string is an error before anything is set up
    owns_group = False
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = dist.get_default_backend_for_device(device.type)
        with communication_first(device.type), fit_for_graphs():
            dist.init_process_group(backend, device_id=_own_accelerator(device))
        owns_group = True
    try:
        return _ranks_of(mesh, device, owns_group)
    except Exception:
        if owns_group:
            leave_group()
        raise


def leave_group() -> None:
    """Destroys the process group, if there is one; graphs that hold its collectives go first."""
    release_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_accelerator(device: torch.device) -> torch.device | None:
    """Makes the accelerator that this rank computes on the current one; None on the host.

    That of the model, or, of a model that is nowhere yet, the launcher's number for this rank on its node.
    """
    if device.type == torch_internals.host_device().type:
        return None
    index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _ranks_of(mesh: str | DeviceMesh | None, device: torch.device, owns_group: bool) -> Ranks:
    launched = dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if launched else (1, 0)
    if isinstance(mesh, DeviceMesh):
        shape = _shape_of(mesh)
    else:
        shape = parse_mesh(mesh) if mesh is not None else data_mesh(world_size)
    if shape.world_size != world_size:
        raise MeshError(
            f"mesh {shape} has {shape.world_size} ranks, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running",
            do=f"launch {shape.world_size} ranks, for example "
            f"`torchrun --nproc-per-node {shape.world_size} script.py`",
        )
    if not launched:
        device_mesh = torch_internals.one_process_mesh(device.type, shape.dims)
        return Ranks(shape, device_mesh, 0, {}, False)
    if not isinstance(mesh, DeviceMesh):
        with communication_first(device.type), fit_for_graphs():
            mesh = init_device_mesh(device.type, shape.sizes, mesh_dim_names=shape.names)
    groups = {name: mesh.get_group(i).group_name for i, name in enumerate(shape.names)}
    return Ranks(shape, mesh, rank, groups, owns_group)


def _shape_of(mesh: DeviceMesh) -> MeshShape:
    """Names and sizes of a DeviceMesh; one dimension without a name is for data."""
    if mesh.mesh_dim_names:
        return MeshShape(tuple(zip(mesh.mesh_dim_names, mesh.shape, strict=True)))
    if mesh.ndim > 1:
        raise MeshError(
            f"the DeviceMesh of shape {tuple(mesh.shape)} does not name its dimensions",
            why="what is done along a dimension follows from its name",
            do="init_device_mesh(..., mesh_dim_names=('dp', 'tp'))",
        )
    return data_mesh(mesh.size())


@contextlib.contextmanager
def communication_first(device_type: str) -> Iterator[bool]:
    """Threads that a process group starts inside are run as soon as they can, before those that compute.

    On the host both share the cores, and by Linux's usual policy a thread of gloo's that is woken may wait
    for milliseconds until it runs: where it does not, a small all-reduce between two pieces of compute
    takes an eighth of the time in the mean (``benchmarks/collective_latency.py``). Threads inherit the
    policy of the one that starts them (so do those that gloo's start, such as OpenMP's where a rank has
    several threads); this one's is as before afterwards.

    Gives whether they do. They do not where an accelerator computes, where the system has no such policy
    or does not allow it (Linux asks for CAP_SYS_NICE), or where this thread has one that somebody chose.
    """
    restored = None
    if device_type == torch_internals.host_device().type:
        with contextlib.suppress(AttributeError, OSError):  # not on this system; not allowed
            before = os.sched_getscheduler(0), os.sched_getparam(0)
            if before[0] == os.SCHED_OTHER:
                lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
                os.sched_setscheduler(0, os.SCHED_RR, lowest)
                restored = before
    try:
        yield restored is not None
    finally:
        if restored is not None:
            os.sched_setscheduler(0, *restored)


@contextlib.contextmanager
def fit_for_graphs() -> Iterator[None]:
    """Communicators that are made inside may be captured, whatever the allocator of the device does.

    In a graph NCCL registers buffers by their addresses, and where segments of memory grow that fails
    (Megatron-LM refuses the two together). NCCL reads the variable when it makes a communicator; what
    somebody chose stays.
    """
    settings = (os.environ.get(name, "") for name in _ALLOCATOR)
    if _REGISTERS in os.environ or not any("expandable_segments:True" in s for s in settings):
        yield
        return
    os.environ[_REGISTERS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_REGISTERS, None)


def are_real() -> bool:
    """Whether other processes are there to talk to."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def agree_on_shapes(key: Any, shown: str, ranks: Ranks) -> None:
    """Every rank must bring the same shapes; called by all ranks when they meet new ones.

    Through the store and not by a collective: a rank that meets one alone would meet the others in one of
    their step's, which takes what it gets.

    Raises:
        BatchError: they differ, and the message lists them by rank; or the others do not come, until the
            store's own timeout.
    """
    if ranks.shape.world_size == 1 or not are_real():
        return
    store = torch_internals.rendezvous_store()
    counter = f"stepgraph/batches of rank {ranks.rank}"
    number = store.add(counter, 1)
    keys = [f"stepgraph/batch {number}/{rank}" for rank in range(ranks.shape.world_size)]
    own = json.dumps([re.sub(r" at 0x[0-9a-f]+", "", str(key)), shown])
    store.set(keys[ranks.rank], own)
    try:
        store.wait(keys, timedelta(seconds=PATIENCE))
    except RuntimeError:  # how a wait ends depends on the kind of store
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        log.warning(
            "rank %d has a batch of a new shape (%s) and waits for ranks %s to meet one: every rank "
            "must bring the same shapes at every step",
            ranks.rank,
            shown,
            late,
        )
        try:
            store.wait(keys, store.timeout)
        except RuntimeError as error:
            store.delete_key(keys[ranks.rank])
            store.add(counter, -1)
            raise BatchError(
                f"rank {ranks.rank} has a batch of a new shape ({shown}), and ranks {late} have none",
                do="use a sampler that gives every rank the same number of rows (drop_last=True)",
            ) from error
    everyone = [json.loads(store.get(key)) for key in keys]
    if len({key for key, _ in everyone}) > 1:
        raise BatchError(
            "the ranks bring batches of different shapes: "
            + "; ".join(f"rank {rank}: {shown}" for rank, (_, shown) in enumerate(everyone)),
            why="the loss is that of one process on the global batch, sharded equally over the ranks",
            do="use a sampler that gives every rank the same number of rows (drop_last=True)",
        )


def largest(ranks: Ranks, *numbers: int) -> list[int]:
    """The largest that any rank brings of each number (below 2^63); called by all ranks."""
    if ranks.shape.world_size == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.int64, device=ranks.device_mesh.device_type)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def agree_on(tensor: torch.Tensor, ranks: Ranks) -> None:
    """Gives every rank the first rank's values, in place."""
    if ranks.shape.world_size > 1:
        dist.broadcast(tensor, src=0)


def from_first_rank(value: Any) -> Any:
    """The first rank's value, on every rank; called by all of them."""
    if not dist.is_initialized():
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


class Messages:
    """One conversation of all ranks that needs no collective, so that a thread may wait for it.

    A save that goes on while the next step runs must not touch a process group: its collectives would
    come between those of the step, in another order on every rank. The store by which the ranks found
    each other has none of that. ``token`` sets one conversation apart, the same on every rank.
    """

    def __init__(self, ranks: Ranks, token: str) -> None:
        self.rank, self.size = ranks.rank, ranks.shape.world_size
        if self.size > 1:
            self._store = dist.PrefixStore(f"stepgraph/{token}", torch_internals.rendezvous_store())

    def gather(self, topic: str, value: Any) -> list[Any] | None:
        """Every rank's value in order, on the first rank; None elsewhere."""
        if self.size == 1:
            return [value]
        if self.rank:
            self._put(f"{topic}/{self.rank}", value)
            return None
        return [value] + [self._take(f"{topic}/{rank}") for rank in range(1, self.size)]

    def tell(self, topic: str, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        if self.rank == 0:
            for rank in range(1, self.size):
                self._put(f"{topic}/{rank}", value)
            return value
        return self._take(f"{topic}/{self.rank}")

    def _put(self, topic: str, value: Any) -> None:
        self._store.set(topic, pickle.dumps(value).hex())  # a store's values are strings

    def _take(self, topic: str) -> Any:
        """Waits for a message and removes it. Waiting inside the store would lock it for others."""
        stop = time.monotonic() + LIMIT_SECONDS
        while not self._store.check([topic]):
            if time.monotonic() > stop:
                raise TimeoutError(f"no message {topic!r} after {LIMIT_SECONDS:.0f} seconds")
            time.sleep(_POLL_SECONDS)
        packed = self._store.get(topic)
        self._store.delete_key(topic)
        return pickle.loads(bytes.fromhex(packed.decode()))
