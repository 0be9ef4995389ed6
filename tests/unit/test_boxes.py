"""Boxes and views against numpy's and torch's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mimo.boxes import (
    Box,
    View,
    box_of_view,
    consecutive_runs,
    contiguous_strides,
    flat_range_boxes,
    is_partition,
    moved_offset,
    partition_problems,
    subtract,
)

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)
SHAPE = (4, 3, 5)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], least: int = 1) -> Box:
    """Draw a box of a tensor with at least so many elements on each axis."""
    starts = tuple(draw(st.integers(0, size - least)) for size in shape)
    return Box(starts, tuple(draw(st.integers(start + least, size)) for start, size in zip(starts, shape, strict=True)))


def counts(shape: tuple[int, ...], given_boxes: list[Box], margin: int = 8) -> np.ndarray:
    """How many of the boxes contain each element of a tensor, and of a margin behind it on each axis."""
    found = np.zeros(tuple(size + margin for size in shape), int)
    for box in given_boxes:
        found[box.slices] += 1
    return found


@given(boxes(SHAPE, 0), boxes(SHAPE, 0))
def test_boxes_share_what_both_index(one: Box, other: Box) -> None:
    inside = counts(SHAPE, [one], 0)
    assert inside.sum() == one.numel and inside[one.slices].shape == one.sizes
    both = counts(SHAPE, [one, other], 0) == 2
    shared = one.intersection(other)
    assert (shared is None) == (not both.any())
    assert np.array_equal(both, counts(SHAPE, [shared] if shared else [], 0) == 1)
    assert Box.whole(SHAPE).intersection(one) == (one if one.numel else None)
    assert Box.at(one.starts, one.sizes) == one
    if other.numel:
        assert one.contains(other) == (shared == other)


def test_boxes_of_other_tensors_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="1 and 2 axes"):
        Box.whole((3,)).intersection(Box.whole((3, 3)))
    assert not Box.whole((3, 3)).contains(Box.whole((3,)))
    assert not Box.whole((9,)).contains(Box((5,), (3,)))


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1 and scalar.intersection(scalar) == scalar and str(scalar) == "[]"
    assert is_partition(scalar, [scalar]) and not is_partition(scalar, []) and not is_partition(scalar, [scalar] * 2)
    assert partition_problems(scalar, [scalar] * 2) == ["[] and [] overlap"]
    assert contiguous_strides(()) == () and list(flat_range_boxes((), 0, 1)) == [scalar]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes that make it up: cut again and again, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    found = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(box.starts[axis], box.stops[axis]))
        found += [Box(box.starts, (*box.stops[:axis], cut, *box.stops[axis + 1:])),
                  Box((*box.starts[:axis], cut, *box.starts[axis + 1:]), box.stops)]
    return shape, draw(st.permutations(found))


@settings(max_examples=300, deadline=None)
@given(partitions(), st.data())
def test_a_partition_has_every_element_once(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, found = case
    whole = Box.whole(shape)
    assert is_partition(whole, found) and partition_problems(whole, found) == []
    number = data.draw(st.integers(0, len(found) - 1))
    box = found[number]
    changed = data.draw(st.sampled_from([
        [], [box] * 2, [Box.at([start + 1 for start in box.starts], box.sizes)],
        [Box.at(box.starts, [size + 1 for size in box.sizes])], [Box.at(found[0].starts, box.sizes)]]))
    others = [*found[:number], *changed, *found[number + 1:]]
    once = np.array_equal(counts(shape, others), counts(shape, [whole]))
    assert is_partition(whole, others) == once
    # An empty box outside of the tensor holds nothing, and is reported all the same.
    assert partition_problems(whole, others) == [] or not once or any(not whole.contains(other) for other in others)
    assert once or partition_problems(whole, others)


def test_the_faults_of_a_partition_are_named() -> None:
    whole, top = Box.whole((4, 6)), Box((0, 0), (2, 6))
    assert partition_problems(whole, [top]) == ["12 of 24 elements are missing"]
    assert partition_problems(whole, [top, Box((1, 0), (4, 6))]) == ["[0:2, 0:6] and [1:4, 0:6] overlap"]
    assert partition_problems(whole, [top, Box((2, 0), (5, 6))]) == ["[2:5, 0:6] lies outside"]
    assert not is_partition(Box.whole((2, 2)), [Box((0,), (4,))]) and not is_partition(Box.whole((2, 2)), [])
    # The second box counts as minus two elements, which would make up for what the others share.
    assert not is_partition(Box.whole((8,)), [Box((0,), (5,)), Box((5,), (3,)), Box((3,), (8,))])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_left_without_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    left, mask = [Box.whole(shape)], np.ones(shape, dtype=bool)
    for _ in range(3):
        box = data.draw(boxes(shape))
        left, removed = subtract(left, box)
        assert removed == int(mask[box.slices].sum())
        mask[box.slices] = False
    assert np.array_equal(counts(shape, left, 0), mask.astype(int))


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    size = math.prod(shape)
    return shape, draw(st.integers(0, size)), draw(st.integers(0, size))


@settings(max_examples=600, deadline=None)
@example(((1, 1, 1), 0, 1))
@example(((4, 5, 6), 0, 120))
@example(((4, 5, 6), 119, 120))
@given(flat_ranges())
def test_boxes_tile_any_flat_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = case
    order = np.arange(math.prod(shape)).reshape(shape)
    found = list(flat_range_boxes(shape, begin, end))
    assert all(len(box.starts) == len(shape) and box.numel for box in found) and len(found) <= 2 * len(shape) - 1
    inside = [number for box in found for number in order[box.slices].ravel()]
    assert inside == list(range(begin, end)), "in order, without a gap"


@given(boxes(SHAPE, 0), boxes(SHAPE, 0))
def test_an_address_moves_with_its_box(outer: Box, other: Box) -> None:
    inner = outer.intersection(other)
    if inner is None:
        return
    whole = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    local = np.ascontiguousarray(whole[outer.slices])
    strides = contiguous_strides(outer.sizes)
    assert strides == tuple(stride // 8 for stride in np.empty(outer.sizes, np.int64).strides)
    found = np.lib.stride_tricks.as_strided(local.reshape(-1)[moved_offset(strides, outer, inner):], inner.sizes,
                                            [stride * local.itemsize for stride in strides])
    assert np.array_equal(found, whole[inner.slices])


@given(boxes(SHAPE), st.permutations(range(3)))
def test_runs_are_the_elements_of_a_view(box: Box, order: list[int]) -> None:
    part = np.arange(math.prod(SHAPE)).reshape(SHAPE)[box.slices].transpose(order)
    first, strides = int(part.reshape(-1)[0]), tuple(stride // part.itemsize for stride in part.strides)
    length, starts = consecutive_runs(part.shape, strides)
    elements = [first + start + step for start in starts for step in range(length)]
    assert elements == sorted(part.reshape(-1).tolist())
    assert View(first, part.shape, strides).end == elements[-1] + 1
    assert View(7, (0, 3), (3, 1)).end == 7


# Boxes found from the views of a copy.


def view_of(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a tensor of distinct numbers, a view of it made as loaders make theirs, a place of the view's shape."""
    tensor = torch.arange(draw(st.just(0)), 256)
    shape = draw(SHAPES)
    tensor = tensor[:torch.Size(shape).numel()].view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    view = tensor
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "permute", "select", "unsqueeze", "split", "merge", "step"]))
        axis = draw(st.integers(0, view.ndim - 1)) if view.ndim else 0
        if kind == "unsqueeze":
            view = view.unsqueeze(axis)
        elif not view.ndim:
            continue
        elif kind == "narrow":
            start = draw(st.integers(0, view.shape[axis] - 1))
            view = view.narrow(axis, start, draw(st.integers(1, view.shape[axis] - start)))
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.ndim))))
        elif kind == "select":
            view = view.select(axis, draw(st.integers(0, view.shape[axis] - 1)))
        elif kind == "split" and view.shape[axis] % 2 == 0:
            view = view.unflatten(axis, (2, -1))
        elif kind == "merge" and view.is_contiguous():
            view = view.reshape(-1)
        elif kind == "step":
            view = view[::2]
    place = torch.full((2 * view.numel() + 3,), -1)
    order = draw(st.permutations(range(view.ndim)))
    target = place[draw(st.integers(0, 3)):][:view.numel()].view([view.shape[axis] for axis in order])
    return tensor, view, target.permute([order.index(axis) for axis in range(view.ndim)])


@settings(max_examples=600, deadline=None)
@given(copies())
def test_a_box_written_to_its_place_is_what_the_copy_writes(case: tuple[torch.Tensor, ...]) -> None:
    tensor, view, target = case
    found = box_of_view(view_of(tensor), view_of(view), view_of(target))
    values = set(view.flatten().tolist())
    if found is None:
        return
    box, where = found
    part = tensor[box.slices]
    assert set(part.flatten().tolist()) == values
    expected = torch.full_like(target, -1).copy_(view)
    target.as_strided(where.sizes, where.strides, where.offset).copy_(part)
    assert torch.equal(target, expected)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_slices_transposed_or_with_their_axes_split_and_merged_are_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(boxes(shape))
    tensor = torch.empty(shape)
    view = tensor[box.slices]
    target = torch.empty_like(view, memory_format=torch.contiguous_format)
    order = data.draw(st.permutations(range(len(shape))))
    for source, place in ((view, target), (view.permute(order), target.permute(order)),
                          (view.unsqueeze(0), target.unsqueeze(0))):
        found = box_of_view(view_of(tensor), view_of(source), view_of(place))
        assert found is not None and found[0] == box
    if shape and shape[0] == box.sizes[0]:
        found = box_of_view(view_of(tensor), view_of(view.unflatten(0, (-1, 1))), view_of(target.unflatten(0, (-1, 1))))
        assert found is not None and found[0] == box
    whole = torch.empty(shape)
    found = box_of_view(view_of(tensor), view_of(tensor.view(-1)), view_of(whole.view(-1)))
    assert found == (Box.whole(shape), found[1]) if found else False


def test_a_view_that_is_no_box_is_none() -> None:
    tensor = View(0, (4, 6), (6, 1))
    for source in (View(0, (2, 6), (12, 1)), View(3, (12,), (1,)), View(0, (2, 6), (0, 1)), View(0, (4, 2), (6, 2))):
        target = torch.empty(source.sizes)
        assert box_of_view(tensor, source, view_of(target)) is None, source


def test_rows_that_are_interleaved_at_their_place_are_none() -> None:
    rows = torch.empty(6, 4)
    place = torch.empty(6, 4).view(3, 2, 4).transpose(0, 1)
    assert box_of_view(view_of(rows), view_of(rows.view(2, 3, 4)), view_of(place)) is None
