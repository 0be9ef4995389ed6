"""Which box of a tensor a strided view is: how an engine's loader is understood from the views it copies.

A loader slices, narrows, transposes and reshapes a checkpoint's tensor before it copies it into a parameter. What is
left of that when the copy happens are two views, each an offset, sizes and strides in its storage. `box_of` turns the
source view back into a box of the whole tensor and says where the elements of that box go. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mimo.refit.slots import Box


@dataclass(frozen=True, slots=True)
class View:
    """A strided view, in elements.

    Attributes:
        offset: of its first element.
        sizes: elements on each axis.
        strides: of its axes.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def box_of(tensor: View, source: View, target: View) -> tuple[Box, View] | None:
    """The box of a tensor that a view of it is, and where the box's elements lie in the target.

    Args:
        tensor: the whole tensor, dense: its axes in any order of memory, without gaps.
        source: a view of it, in the same storage.
        target: a view of the source's sizes of any other storage: element `i` of the source is copied to element `i`.

    Returns:
        The box and a view of the target whose axes are the tensor's; None if the source is no box (strides over rows,
        repeats elements, begins inside one row and ends in the next) or if the target is not strided along its axes.
    """
    assert source.sizes == target.sizes, f"a copy of {source.sizes} to {target.sizes}"
    starts = _position(tensor, source.offset - tensor.offset)
    sizes, strides = [1] * len(starts), [0] * len(starts)
    axes = {stride: axis for axis, (size, stride) in enumerate(zip(tensor.sizes, tensor.strides, strict=True))
            if size > 1}
    for size, step, target_step in _runs(source, target):
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
    box = Box(tuple(starts), tuple(map(int.__add__, starts, sizes)))
    return box, View(target.offset, tuple(sizes), tuple(strides))


def subtract(pieces: Sequence[Box], box: Box) -> tuple[list[Box], int]:
    """What is left of disjoint pieces of a tensor without a box, and how many elements that took away."""
    left, removed = [], 0
    for piece in pieces:
        common = piece.intersection(box)
        if common is None:
            left.append(piece)
            continue
        removed += common.numel
        starts, stops = list(piece.starts), list(piece.stops)
        for axis in range(len(starts)):
            if starts[axis] < common.starts[axis]:
                left.append(Box(tuple(starts), (*stops[:axis], common.starts[axis], *stops[axis + 1:])))
            if common.stops[axis] < stops[axis]:
                left.append(Box((*starts[:axis], common.stops[axis], *starts[axis + 1:]), tuple(stops)))
            starts[axis], stops[axis] = common.starts[axis], common.stops[axis]
    return left, removed


def _position(tensor: View, offset: int) -> list[int]:
    """Indices of the element at an offset."""
    starts = [0] * len(tensor.sizes)
    for axis in sorted(range(len(starts)), key=lambda axis: (-tensor.strides[axis], tensor.sizes[axis])):
        if tensor.sizes[axis] > 1:
            starts[axis], offset = divmod(offset, tensor.strides[axis])
    return starts


def _runs(source: View, target: View) -> list[tuple[int, int, int]]:
    """Sizes and both strides of the axes, those merged that both views walk through in one step."""
    runs: list[tuple[int, int, int]] = []
    axes = sorted(zip(source.sizes, source.strides, target.strides, strict=True), key=lambda axis: -axis[1])
    for size, step, target_step in axes:
        if size == 1:
            continue
        if runs and runs[-1][1:] == (size * step, size * target_step):
            size *= runs.pop()[0]
        runs.append((size, step, target_step))
    return runs
