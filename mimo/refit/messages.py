"""Packing the boxes of a plan into messages and taking them out again.

A message is what one trainer rank sends one worker for one chunk: its boxes in the order of the plan, each row-major,
in the dtype of the wire, each at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from mimo.refit.slots import DTYPE_BYTES, Address, Box

# Of a box in a message: every dtype's, and wide enough for vectorised copies.
ALIGNMENT = 16


class Carried(Protocol):
    """What a message needs to know of an operation of the plan."""

    @property
    def entry(self) -> int:
        """Number of its tensor in the chunk plan."""
        ...

    @property
    def box(self) -> Box:
        """In the whole tensor."""
        ...


def message_bytes(operations: Iterable[Carried], dtypes: Sequence[str]) -> int:
    """Bytes of the message that carries these.

    Args:
        operations: in order.
        dtypes: of every entry of the chunk plan, on the wire.
    """
    return sum(_aligned(operation.box.numel * DTYPE_BYTES[dtypes[operation.entry]]) for operation in operations)


def boxes_in(message: torch.Tensor, operations: Iterable[Carried], dtypes: Sequence[str]) -> list[torch.Tensor]:
    """Views of a message, uint8, as the boxes that it carries."""
    views, first = [], 0
    for operation in operations:
        dtype = dtypes[operation.entry]
        num_bytes = operation.box.numel * DTYPE_BYTES[dtype]
        views.append(message[first:first + num_bytes].view(torch_dtype(dtype)).view(operation.box.sizes))
        first += _aligned(num_bytes)
    return views


def pack(operations: Sequence[Carried], dtypes: Sequence[str], sources: Sequence[torch.Tensor],
         device: torch.device) -> torch.Tensor:
    """A new message, uint8, with the sources' values.

    Args:
        operations: in order.
        dtypes: of every entry, on the wire.
        sources: what each carries, strided views of its box; converted to the dtype of the wire.
        device: where the message lies.
    """
    message = torch.empty(message_bytes(operations, dtypes), dtype=torch.uint8, device=device)
    copy_all(boxes_in(message, operations, dtypes), sources)
    return message


def unpack(message: torch.Tensor, operations: Sequence[Carried], dtypes: Sequence[str],
           targets: Sequence[torch.Tensor]) -> None:
    """Write what a message carries into strided views of the targets' tensors."""
    copy_all(targets, boxes_in(message, operations, dtypes))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, with few launches where dtypes and devices agree."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def strided(find: Callable[[str], torch.Tensor], address: Address, sizes: Sequence[int]) -> torch.Tensor:
    """The view that an address means.

    Args:
        find: the tensor of a name.
        address: of a box.
        sizes: of the box.

    Raises:
        RuntimeError: the box does not lie inside the tensor.
    """
    tensor = find(address.tensor).detach()
    last = address.offset + sum((size - 1) * stride for size, stride in zip(sizes, address.strides, strict=True))
    if address.offset < 0 or last >= tensor.numel() or math.prod(sizes) > tensor.numel():
        raise RuntimeError(f"{address.tensor} {list(tensor.shape)} has no box of {list(sizes)} at element "
                           f"{address.offset} with strides {list(address.strides)}")
    assert tensor.is_contiguous(), f"{address.tensor}: strides {tensor.stride()} of {list(tensor.shape)}"
    return tensor.as_strided(tuple(sizes), address.strides, tensor.storage_offset() + address.offset)


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` as `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
