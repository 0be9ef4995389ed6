"""What both ends of a refit say about the weights: plain data, in the coordinates of whole Hugging Face tensors.

The trainer's ranks and the engine's workers each describe the part they hold as `Slot`s: which box of which Hugging
Face tensor lies where in which of their own tensors. Planning is then the intersection of boxes and knows neither
Megatron nor vLLM. Nothing here needs torch, and slots and entries turn into JSON and back;
`mimo.refit.tables` has what is sent of many.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor.

    Attributes:
        starts: first index on each axis.
        stops: one past the last, at least `starts`.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements on each axis."""
        return tuple(map(int.__sub__, self.stops, self.starts))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """What two boxes of one tensor share; None where that is nothing."""
        assert len(self.starts) == len(other.starts), f"boxes of {len(self.starts)} and {len(other.starts)} axes"
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a box lies in a rank's own tensor, in elements counted from that tensor's first one.

    Attributes:
        tensor: its name on that rank (a parameter's or buffer's path).
        offset: of the box's first element.
        strides: of the box's axes; element `i` of the box is at `offset + sum(i[axis] * strides[axis])`.
    """

    tensor: str
    offset: int
    strides: tuple[int, ...]

    def inside(self, outer: Box, inner: Box) -> Address:
        """Where `inner`, a part of `outer`, lies if this is where `outer` lies."""
        moved = sum((start - origin) * stride
                    for start, origin, stride in zip(inner.starts, outer.starts, self.strides, strict=True))
        return Address(self.tensor, self.offset + moved, self.strides)


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a Hugging Face tensor and the place of its elements on a rank.

    Attributes:
        name: of the whole tensor, as the engine's loader spells it.
        box: in the whole tensor.
        address: on the rank.
    """

    name: str
    box: Box
    address: Address


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole tensor of the chunk plan, announced before any byte of it moves.

    Attributes:
        name: as the engine's loader spells it.
        dtype: on the wire: `float32` for what must keep it, else that of the engine's model.
        shape: of the whole tensor.
        keep_fp32: routing-critical: float32 from the trainer's tensor to the engine's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    keep_fp32: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire, of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Holder:
    """A box of a tensor and the trainer's ranks that have it, all with the same values.

    Attributes:
        box: in the whole tensor.
        ranks: global trainer ranks, ascending.
    """

    box: Box
    ranks: tuple[int, ...]


Holders = dict[str, list[Holder]]
"""Name -> the boxes that make up the tensor: they do not overlap and leave no gap."""


@dataclass(frozen=True)
class Wants:
    """What one worker of the engine takes in.

    Attributes:
        direct: boxes written straight into its live tensors; in the order of the chunk plan's entries.
        loader: names that go whole through the engine's own loading, in the order of the chunk plan's entries.
    """

    direct: tuple[Slot, ...]
    loader: tuple[str, ...]

    def digest(self) -> str:
        """Equal for workers that take in the same."""
        return hashlib.sha256(json.dumps([list(map(slot_as_json, self.direct)), self.loader]).encode()).hexdigest()[:32]


def slot_as_json(slot: Slot) -> list[Any]:
    """A slot as plain lists."""
    return [slot.name, list(slot.box.starts), list(slot.box.stops), slot.address.tensor, slot.address.offset,
            list(slot.address.strides)]


def slot_from_json(value: Sequence[Any]) -> Slot:
    """The other way."""
    name, starts, stops, tensor, offset, strides = value
    return Slot(name, Box(tuple(starts), tuple(stops)), Address(tensor, offset, tuple(strides)))


def entry_as_json(entry: Entry) -> list[Any]:
    """An entry as plain lists."""
    return [entry.name, entry.dtype, list(entry.shape), entry.keep_fp32]


def entry_from_json(value: Sequence[Any]) -> Entry:
    """The other way."""
    name, dtype, shape, keep_fp32 = value
    return Entry(name, dtype, tuple(shape), keep_fp32)


def contiguous_strides(sizes: Iterable[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(list(sizes)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
