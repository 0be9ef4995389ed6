"""Descriptions of the weights by both ends of a refit: plain data, in the coordinates of whole Hugging Face tensors.

The trainer's ranks and the engine's workers each describe the part they hold as `TensorSlice`s: which box of which
Hugging Face tensor lies where in which of their own tensors. Planning is then the intersection of boxes and knows
neither Megatron nor vLLM. Nothing here needs torch, and slices and entries turn into JSON and back;
`mimo.refit.tensor_slices` has what is sent of many.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mimo.boxes import Box, moved_offset

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


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
        """Return the address of `inner`, a part of `outer`, if this is the address of `outer`."""
        return Address(self.tensor, self.offset + moved_offset(self.strides, outer, inner), self.strides)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a Hugging Face tensor and the place of its elements on a rank.

    Attributes:
        name: of the whole tensor, as the engine's loader knows it.
        box: in the whole tensor.
        address: on the rank.
    """

    name: str
    box: Box
    address: Address


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One whole tensor of the chunk plan, announced before any byte of it moves.

    Attributes:
        name: as the engine's loader knows it.
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
class RecvSpec:
    """Tensors that one worker of the engine takes in.

    Attributes:
        direct: boxes written straight into its live tensors; in the order of the chunk plan's entries.
        loader: names that go whole through the engine's own loading, in the order of the chunk plan's entries.
    """

    direct: tuple[TensorSlice, ...]
    loader: tuple[str, ...]

    def digest(self) -> str:
        """Return a checksum that is equal for workers that take in the same."""
        packed = json.dumps([list(map(slice_as_json, self.direct)), self.loader])
        return hashlib.sha256(packed.encode()).hexdigest()[:32]


def slice_as_json(part: TensorSlice) -> list[Any]:
    """Return a slice as plain lists."""
    return [part.name, list(part.box.starts), list(part.box.stops), part.address.tensor, part.address.offset,
            list(part.address.strides)]


def slice_from_json(value: Sequence[Any]) -> TensorSlice:
    name, starts, stops, tensor, offset, strides = value
    return TensorSlice(name, Box(tuple(starts), tuple(stops)), Address(tensor, offset, tuple(strides)))


def meta_as_json(entry: TensorMeta) -> list[Any]:
    """Return an entry as plain lists."""
    return [entry.name, entry.dtype, list(entry.shape), entry.keep_fp32]


def meta_from_json(value: Sequence[Any]) -> TensorMeta:
    name, dtype, shape, keep_fp32 = value
    return TensorMeta(name, dtype, tuple(shape), keep_fp32)


# The tables that the two ends of a refit exchange, as JSON of a size that does not grow with equal layers.
#
# Layers that are alike differ in one number of their names. A table is therefore patterns, the rows of a layer with
# `*` for its number, and blocks, which pattern each layer follows. Whoever needs only some names reads only their
# layers.


# The first number of a name: of its layer.
LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.)")
MARK = "*"


def recv_spec_table(spec: RecvSpec) -> dict[str, Any]:
    """Pack what a worker takes in, to send."""
    return {"direct": folded([slice_as_json(part) for part in spec.direct]),
            "loader": folded([[name] for name in spec.loader])}


def recv_spec_from_table(table: dict[str, Any], names: Collection[str] | None = None) -> RecvSpec:
    """Unpack what a worker takes in; these names alone if they are given."""
    return RecvSpec(tuple(map(slice_from_json, unfolded(table["direct"], names))),
                    tuple(row[0] for row in unfolded(table["loader"], names)))


def wanted_names(table: dict[str, Any]) -> set[str]:
    """Return every name in a table of `recv_spec_table`."""
    return {row[0] for route in ("direct", "loader") for row in unfolded(table[route])}


def holders_table(holders: Holders) -> dict[str, Any]:
    """Pack what the trainer's ranks hold, to send."""
    return folded([[name, [[list(held.box.starts), list(held.box.stops), list(held.ranks)] for held in boxes]]
                   for name, boxes in sorted(holders.items(), key=lambda item: _layer(item[0]) or "")])


def holders_from_table(table: dict[str, Any]) -> Holders:
    """Unpack what the trainer's ranks hold."""
    return {name: [Holder(Box(tuple(starts), tuple(stops)), tuple(ranks)) for starts, stops, ranks in boxes]
            for name, boxes in unfolded(table)}


def folded(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Fold rows, each of which begins with a name, into patterns and blocks.

    Raises:
        ValueError: a name has the mark of a layer's number in it.
    """
    patterns: dict[str, int] = {}
    blocks: list[list[Any]] = []
    block: list[list[Any]] = []
    layer = None

    def close() -> None:
        if block:
            blocks.append([patterns.setdefault(json.dumps(block), len(patterns)), layer])
            block.clear()

    for row in rows:
        here = _layer(row[0])
        if here != layer:
            close()
            layer = here
        block.append([_masked(item, layer) for item in row])
    close()
    return {"patterns": [json.loads(pattern) for pattern in patterns], "blocks": blocks}


def unfolded(table: dict[str, Any], names: Collection[str] | None = None) -> Iterator[list[Any]]:
    """Yield the rows; those of `names` alone if they are given."""
    layers = None if names is None else {_layer(name) for name in names}
    for number, layer in table["blocks"]:
        if layers is not None and layer not in layers:
            continue
        for row in table["patterns"][number]:
            if layer is None:
                found = row
            else:
                found = [item.replace(MARK, layer) if isinstance(item, str) else item for item in row]
            if names is None or found[0] in names:
                yield found


def _layer(name: str) -> str | None:
    found = LAYER.search(name)
    return found.group(1) if found else None


def _masked(item: Any, layer: str | None) -> Any:
    """Put the mark in place of a name's layer number if it is that of its row."""
    if not isinstance(item, str):
        return item
    if MARK in item:
        raise ValueError(f"{item}: a name with {MARK!r}")
    found = LAYER.search(item)
    if layer is None or found is None or found.group(1) != layer:
        return item
    return f"{item[:found.start()]}{MARK}{item[found.end():]}"
