"""Describes the weights at both ends of a refit as plain data, in the coordinates of whole Hugging Face tensors.

The trainer's ranks and the engine's workers describe the parts that they hold as `TensorSlice`s: boxes of Hugging Face
tensors and their places in tensors of their own. Planning then only intersects boxes and knows neither Megatron nor
vLLM. Nothing here needs torch. The tables at the end are what both ends exchange.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mimo.boxes import Box, moved_offset

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class Address:
    """Place of a box in a rank's own tensor, in elements from the first element of that tensor.

    Attributes:
        tensor: name of the tensor on that rank: the path of a parameter or buffer.
        offset: offset of the box's first element.
        strides: strides of the box's axes. Element `i` of the box is at `offset + sum(i[axis] * strides[axis])`.
    """

    tensor: str
    offset: int
    strides: tuple[int, ...]

    def inside(self, outer: Box, inner: Box) -> Address:
        """Return the address of `inner`, a part of `outer`, if this is the address of `outer`."""
        return Address(self.tensor, self.offset + moved_offset(self.strides, outer, inner), self.strides)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a Hugging Face tensor and the place of its elements on a rank."""

    name: str
    box: Box
    address: Address


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A whole tensor of the chunk plan.

    Attributes:
        name: name of the tensor.
        dtype: dtype on the wire: `float32` for tensors that must keep it, otherwise that of the engine's model.
        shape: shape of the whole tensor.
        keep_fp32: whether it must be float32 in the trainer, on the wire and in the engine, because it affects routing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    keep_fp32: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor on the wire."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Holder:
    """A box of a tensor and the trainer's ranks that have it, all with the same values.

    Attributes:
        box: the box in the whole tensor.
        ranks: global ranks of the trainer, ascending.
    """

    box: Box
    ranks: tuple[int, ...]


Holders = dict[str, list[Holder]]
"""Name -> the boxes that make up the tensor: they do not overlap and leave no gap."""


@dataclass(frozen=True)
class RecvSpec:
    """Tensors that one worker of the engine takes in.

    Attributes:
        direct: boxes that are written directly into its live tensors, in the order of the chunk plan's entries.
        loader: names of tensors that go through the engine's own loading as a whole, in the same order.
    """

    direct: tuple[TensorSlice, ...]
    loader: tuple[str, ...]


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


# Tables that the two ends of a refit exchange, as JSON whose size does not grow with equal layers.
#
# Equal layers differ in one number of their names. Therefore a table has patterns, which are the rows of a layer with
# `*` for its number, and blocks, which assign a pattern to each layer. A reader that needs only some names unpacks only
# their layers.


# The first number of a name, which is that of its layer.
LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.)")
MARK = "*"


def recv_spec_table(spec: RecvSpec) -> dict[str, Any]:
    """Pack what a worker takes in, to send."""
    return {"direct": folded([slice_as_json(part) for part in spec.direct]),
            "loader": folded([[name] for name in spec.loader])}


def table_digest(table: dict[str, Any]) -> str:
    """Return a checksum of a table, which is equal for workers that take in the same."""
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:32]


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
            if names is not None and (row[0] if layer is None else row[0].replace(MARK, layer)) not in names:
                continue
            if layer is None:
                yield row
            else:
                yield [item.replace(MARK, layer) if isinstance(item, str) else item for item in row]


@lru_cache(maxsize=1 << 17)  # the same names are asked for in every table
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
