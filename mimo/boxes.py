"""Axis-aligned boxes of tensors, and strided views of memory, as plain numbers. Pure Python: needs no torch.

A `Box` is a part of a whole tensor: what a rank holds of a Hugging Face tensor, a stored piece of a checkpoint, a slice
that an engine's loader copies. A `View` is how the elements of a tensor or box lie in memory. Checkpoints, weights and
refits all compute with these two; whatever intersects, divides or covers tensors is here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor. As a string, what one would index with: `[0:4, 2:6]`.

    Attributes:
        starts: first index on each axis.
        stops: one past the last, at least `starts`.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box of all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Self:
        """Return the box that begins at `offsets` and has `sizes`, as checkpoints describe their pieces."""
        return cls(tuple(offsets), tuple(start + size for start, size in zip(offsets, sizes, strict=True)))

    @lru_cache(maxsize=4096)  # layers and experts are alike  # noqa: B019
    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops, strict=True))}]"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements on each axis."""
        return tuple(map(int.__sub__, self.stops, self.starts))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor: `whole[box.slices]`."""
        return tuple(map(slice, self.starts, self.stops))

    def intersection(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor; None if it is empty."""
        assert len(self.starts) == len(other.starts), f"boxes of {len(self.starts)} and {len(other.starts)} axes"
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def contains(self, inner: Box) -> bool:
        """Whether `inner` is a box with as many axes that lies inside this one."""
        return (len(self.starts) == len(inner.starts) == len(inner.stops)
                and all(map(int.__le__, self.starts, inner.starts))
                and all(map(int.__le__, inner.starts, inner.stops))
                and all(map(int.__le__, inner.stops, self.stops)))


def is_partition(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether boxes contain each element of the whole exactly once, and nothing else. Takes time linear in the boxes.

    The mixed difference over all axes of a box's indicator function is +1 or -1 at the box's corners and 0 elsewhere.
    Different functions have different mixed differences, so the boxes add up to the whole if their signed corners do.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for weight, box in itertools.chain([(-1, whole)], ((1, box) for box in boxes)):
        # A box whose stops lie before its starts would count as a negative one, and could make up for an overlap.
        if len(box.starts) != len(whole.starts) or any(map(int.__gt__, box.starts, box.stops)):
            return False
        ends = [((start, 1), (stop, -1)) for start, stop in zip(box.starts, box.stops, strict=True)]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def partition_problems(whole: Box, boxes: Sequence[Box]) -> list[str]:
    """Say why boxes do not contain each element of the whole exactly once; empty if they do."""
    problems = [f"{box} lies outside" for box in boxes if not whole.contains(box)]
    if problems or is_partition(whole, boxes):
        return problems
    problems = [f"{box} and {other} overlap" for box, other in _overlapping(boxes)]
    if not problems:
        missing = whole.numel - sum(box.numel for box in boxes)
        problems.append(f"{missing} of {whole.numel} elements are missing")
    return problems


def _overlapping(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that share an element, in the order of their starts."""
    ordered = sorted(boxes, key=lambda box: box.starts)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1:]:
            # Starts ascend: from here on, every box begins after this one has ended on the first axis.
            if box.stops and other.starts[0] >= box.stops[0]:
                break
            if box.intersection(other) is not None:
                yield box, other


def subtract(pieces: Sequence[Box], box: Box) -> tuple[list[Box], int]:
    """Return what is left of disjoint pieces of a tensor without a box, and the number of elements taken away."""
    left, removed = [], 0
    for piece in pieces:
        common = piece.intersection(box)
        if common is None:
            left.append(piece)
            continue
        removed += common.numel
        # Cut off what lies before and after the common part, axis by axis; what remains then is the common part.
        starts, stops = list(piece.starts), list(piece.stops)
        for axis in range(len(starts)):
            if starts[axis] < common.starts[axis]:
                left.append(Box(tuple(starts), (*stops[:axis], common.starts[axis], *stops[axis + 1:])))
            if common.stops[axis] < stops[axis]:
                left.append(Box((*starts[:axis], common.stops[axis], *starts[axis + 1:]), tuple(stops)))
            starts[axis], stops[axis] = common.starts[axis], common.stops[axis]
    return left, removed


def flat_range_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cut the elements `begin` to `end` of a row-major tensor into boxes, which follow each other in row-major order.

    A flat range is at most a partial row, whole rows and a partial row on each axis: `2 * len(shape) - 1` boxes.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield Box((begin,), (end,)) if shape else Box((), ())
        return

    def within(row: int, begin: int, end: int) -> Iterator[Box]:
        for box in flat_range_boxes(shape[1:], begin, end):
            yield Box((row, *box.starts), (row + 1, *box.stops))

    row_size = math.prod(shape[1:])
    first, last = begin // row_size, end // row_size
    first_whole = -(-begin // row_size)
    if first_whole > last:  # the range begins and ends inside one row
        yield from within(first, begin - first * row_size, end - first * row_size)
        return
    yield from within(first, begin - first * row_size, (first_whole - first) * row_size)
    if first_whole < last:
        yield Box((first_whole, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    yield from within(last, 0, end - last * row_size)


def contiguous_strides(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(list(sizes)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of memory, in elements. Strides are not negative.

    Attributes:
        offset: offset of its first element.
        sizes: elements on each axis.
        strides: strides of its axes.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the offset of the last element; the offset itself where there are no elements."""
        if 0 in self.sizes:
            return self.offset
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))


@lru_cache(maxsize=1024)  # layers and experts are alike
def consecutive_runs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the length, and the starts from the first element, of the runs of consecutive elements of a strided view.

    Starts ascend. Elements that the view has twice (by a stride of 0) are in two runs.
    """
    length = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride == length and not outer:
            length *= size
        elif size > 1:
            outer.append((stride, size))
    return length, sorted(map(sum, itertools.product(*([stride * step for step in range(size)]
                                                       for stride, size in outer))))


def moved_offset(strides: Sequence[int], outer: Box, inner: Box) -> int:
    """Return by how many elements `inner`, a part of `outer`, begins after `outer` in memory of these strides."""
    return sum((start - origin) * stride
               for start, origin, stride in zip(inner.starts, outer.starts, strides, strict=True))


@lru_cache(maxsize=4096)  # layers and experts are alike
def box_of_view(tensor: View, source: View, target: View) -> tuple[Box, View] | None:
    """Find the box of a tensor that a view of it is, and where the box's elements lie in the target of a copy.

    An engine's loader slices, narrows, transposes and reshapes a checkpoint's tensor before it copies it into a
    parameter. What is left of that when the copy happens are two views.

    Args:
        tensor: the whole tensor, dense: its axes in any order of memory, without gaps.
        source: a view of it, in the same storage.
        target: a view of the source's sizes of any other storage: element `i` of the source is copied to element `i`.

    Returns:
        The box and a view of the target whose axes are the tensor's; None if the source is no box (strides over rows,
        repeats elements, begins inside one row and ends in the next) or if the target is not strided along its axes.
    """
    assert source.sizes == target.sizes, f"a copy of {source.sizes} to {target.sizes}"
    starts = _index_at(tensor, source.offset - tensor.offset)
    sizes, strides = [1] * len(starts), [0] * len(starts)
    axes = {stride: axis for axis, (size, stride) in enumerate(zip(tensor.sizes, tensor.strides, strict=True))
            if size > 1}
    for size, step, target_step in _common_steps(source, target):
        # Give the step to the tensor's axis of the same stride. Where it is longer than that axis, it goes through all
        # of it and on along the next outer one.
        while size > 1:
            axis = axes.pop(step, None)
            if axis is None:
                return None
            room = tensor.sizes[axis]
            strides[axis] = target_step
            if size <= room - starts[axis]:
                sizes[axis], size = size, 1
            elif starts[axis] == 0 and size % room == 0:
                sizes[axis] = room
                size, step, target_step = size // room, step * room, target_step * room
            else:
                return None
    return Box.at(starts, sizes), View(target.offset, tuple(sizes), tuple(strides))


def _index_at(tensor: View, offset: int) -> list[int]:
    """Indices of the element at an offset from a dense tensor's first one."""
    starts = [0] * len(tensor.sizes)
    for axis in sorted(range(len(starts)), key=lambda axis: (-tensor.strides[axis], tensor.sizes[axis])):
        if tensor.sizes[axis] > 1:
            starts[axis], offset = divmod(offset, tensor.strides[axis])
    return starts


def _common_steps(source: View, target: View) -> list[tuple[int, int, int]]:
    """Sizes and both strides of the axes; axes that both views walk through in one step are merged."""
    steps: list[tuple[int, int, int]] = []
    axes = sorted(zip(source.sizes, source.strides, target.strides, strict=True), key=lambda axis: -axis[1])
    for size, step, target_step in axes:
        if size == 1:
            continue
        if steps and steps[-1][1:] == (size * step, size * target_step):
            size *= steps.pop()[0]
        steps.append((size, step, target_step))
    return steps
