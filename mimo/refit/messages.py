"""Packing the boxes of a plan into messages and taking them out again.

A message is what one trainer rank sends one worker for one chunk: its boxes in the order of the plan, each row-major,
in the dtype of the wire, each at a multiple of `ALIGNMENT` bytes. What can be worked out once is: a sync of a model of
experts copies tens of thousands of boxes, and Python's time for each of them is what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mimo.refit.slots import DTYPE_BYTES, Address, Box, contiguous_strides

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


@dataclass(frozen=True)
class Place:
    """Where a box lies in a message, or in a tensor.

    Attributes:
        dtype: of its elements.
        sizes: of the box.
        strides: in elements.
        offset: of its first element, in elements of that dtype.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Layout:
    """What a message looks like.

    Attributes:
        places: of its boxes, in order.
        num_bytes: of all of it.
    """

    places: tuple[Place, ...]
    num_bytes: int

    def boxes(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Views of a message, uint8, as the boxes that it carries."""
        typed = {place.dtype: message.view(place.dtype) for place in self.places}
        return [typed[place.dtype].as_strided(place.sizes, place.strides, typed[place.dtype].storage_offset()
                                              + place.offset) for place in self.places]


def layout(operations: Sequence[Carried], dtypes: Sequence[str]) -> Layout:
    """The message that carries these.

    Args:
        operations: in order.
        dtypes: of every entry of the chunk plan, on the wire.
    """
    places, first = [], 0
    for operation in operations:
        dtype, sizes = dtypes[operation.entry], operation.box.sizes
        places.append(Place(torch_dtype(dtype), sizes, contiguous_strides(sizes), first // DTYPE_BYTES[dtype]))
        first += -(-operation.box.numel * DTYPE_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(places), first)


def pack(shape: Layout, sources: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A new message, uint8, with the sources' values.

    Args:
        shape: of the message.
        sources: what each box carries, strided views; converted to the dtype of the wire.
        device: where the message lies.
    """
    message = torch.empty(shape.num_bytes, dtype=torch.uint8, device=device)
    copy_all(shape.boxes(message), sources)
    return message


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target: those that are alike in few launches, the others one by one."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous() and target.device == source.device:
            into, out = alike.setdefault((target.dtype, source.dtype), ([], []))
            into.append(target)
            out.append(source)
        else:
            target.copy_(source)
    for into, out in alike.values():
        torch._foreach_copy_(into, out)


class Views:
    """Boxes of tensors, in the order of a message's.

    Args:
        addresses: of each box.
        sizes: of each.
    """

    def __init__(self, addresses: Sequence[Address], sizes: Sequence[tuple[int, ...]]) -> None:
        self._boxes = [(address.tensor, size, address.strides, address.offset)
                       for address, size in zip(addresses, sizes, strict=True)]
        self.tensors = tuple(dict.fromkeys(address.tensor for address in addresses))

    def of(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The boxes in these tensors, by name; `check_inside` has been asked before."""
        own = {name: (tensors[name].as_strided, tensors[name].storage_offset()) for name in self.tensors}
        return [own[name][0](size, strides, own[name][1] + offset) for name, size, strides, offset in self._boxes]


def check_inside(tensor: torch.Tensor, address: Address, sizes: Sequence[int]) -> None:
    """Raise RuntimeError where a box does not lie inside a tensor."""
    last = address.offset + sum((size - 1) * stride for size, stride in zip(sizes, address.strides, strict=True))
    if address.offset < 0 or last >= tensor.numel() or not tensor.is_contiguous():
        raise RuntimeError(f"{address.tensor} {list(tensor.shape)} with strides {list(tensor.stride())} has no box of "
                           f"{list(sizes)} at element {address.offset} with strides {list(address.strides)}")


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` as `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
