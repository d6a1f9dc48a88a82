"""Which tensors share memory, whatever objects show it; and another look at the same memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import _reinterpret_tensor, assert_size_stride
from torch._library.utils import zip_schema
from torch.multiprocessing.reductions import StorageWeakRef

# (tensor, sizes, strides, offset from the tensor's own): a view for a third of what an operator takes.
reinterpret = _reinterpret_tensor
# (tensor, sizes, strides): an AssertionError if it is laid out otherwise.
assert_layout = assert_size_stride


def memory_of(value: torch.Tensor) -> int:
    """A number of the memory that a tensor shows, or would; of one without strides its own."""
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory, or would: meta tensors have none."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def shared_arguments(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[bool, Any]]:
    """What an operator's result shares memory with, or what it writes; lists taken apart.

    Returns:
        of each whether it is written, and the argument; nothing of what has no schema.
    """
    schema = getattr(target, "_schema", None)
    for argument, value in () if schema is None else zip_schema(schema, args, kwargs):  # type: ignore
        if argument.alias_info is not None:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                yield argument.alias_info.is_write, one


class Memory:
    """Memory of tensors by name; it is not kept alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Any, str]] = {}

    def remember(self, name: str, tensor: torch.Tensor) -> None:
        """Notes whose memory it is."""
        storage = tensor.untyped_storage()
        self._names[storage._cdata] = StorageWeakRef(storage), name

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Whose memory a tensor shows; None: nobody's, or that of one that is gone."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        reference, name = self._names.get(tensor.untyped_storage()._cdata, (None, None))
        return None if reference is None or reference.expired() else name
