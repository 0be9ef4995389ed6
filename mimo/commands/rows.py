"""Stored tensors, and equal ones of many layers and experts as one row of a table. Importing this needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mimo.weights.keys import global_name, num_stacked_axes, split_layer

WEIGHTS = "weights"


@dataclass(frozen=True)
class StoredInfo:
    """One global tensor of a checkpoint.

    Attributes:
        key: its key in the checkpoint.
        module: the module it belongs to.
        kind: `weights` (parameters and buffers), or a kind of optimizer state (`exp_avg`, `exp_avg_sq`, `fp32_param`).
        name: name inside the module, the same for weights and optimizer state.
        shape: global shape, stacked layers and experts in front.
        dtype: torch's name of it, `bfloat16`.
        num_pieces: pieces it is stored in.
        num_bytes: bytes of its elements.
    """

    key: str
    module: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_pieces: int
    num_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Row:
    """Equal tensors of a module.

    Attributes:
        name: their name, layers and experts as ranges: `decoder.layers.{0-3}.mlp.experts.{0-7}.linear_fc1.weight`.
        count: how many they are.
        shape: of one of them.
        dtype: of each.
        num_bytes: of all.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def numel(self) -> int:
        """Elements of all."""
        return self.count * math.prod(self.shape)


@dataclass
class _Group:
    prefix: str
    rest: str
    rows: list[Row] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def row(self) -> Row:
        first = self.rows[0]
        name = f"{self.prefix}{_ranges(self.layers)}.{self.rest}" if self.layers else first.name
        return Row(name, sum(row.count for row in self.rows), first.shape, first.dtype,
                   sum(row.num_bytes for row in self.rows))


def rows_of(tensors: Iterable[StoredInfo]) -> list[Row]:
    """One row for tensors that differ in the number of their layer or expert only, in the order of the first."""
    groups: dict[tuple[object, ...], _Group] = {}
    for tensor in tensors:
        row = _row(tensor)
        layer = split_layer(row.name)
        if layer is None:
            groups[row.name, row.shape, row.dtype] = _Group("", "", [row])
            continue
        prefix, number, rest = layer
        group = groups.setdefault((prefix, rest, row.shape, row.dtype), _Group(prefix, rest))
        group.rows.append(row)
        group.layers.append(number)
    return [group.row() for group in groups.values()]


def _row(tensor: StoredInfo) -> Row:
    """A stored tensor without its stacked axes."""
    stacked = num_stacked_axes(tensor.name)
    axes, shape = tensor.shape[:stacked], tensor.shape[stacked:]
    name = global_name(tensor.name, [_ranges(list(range(size))) for size in axes])
    return Row(name, math.prod(axes), shape, tensor.dtype, tensor.num_bytes)


def _ranges(numbers: list[int]) -> str:
    """`{0-3,7}`; a number alone without braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if text.isdecimal() else f"{{{text}}}"
