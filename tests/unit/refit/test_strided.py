"""Boxes found from views, against torch's own indexing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.refit.dispatch_trace import View, box_of, subtract, view_of
from mimo.refit.tensor_slices import Box

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(starts, tuple(draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)))


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor of distinct numbers, a view of it made as loaders make theirs, a place of the view's shape."""
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
    found = box_of(view_of(tensor), view_of(view), view_of(target))
    values = set(view.flatten().tolist())
    if found is None:
        return
    box, where = found
    part = tensor[tuple(map(slice, box.starts, box.stops))]
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
    view = tensor[tuple(map(slice, box.starts, box.stops))]
    target = torch.empty_like(view, memory_format=torch.contiguous_format)
    order = data.draw(st.permutations(range(len(shape))))
    for source, place in ((view, target), (view.permute(order), target.permute(order)),
                          (view.unsqueeze(0), target.unsqueeze(0))):
        found = box_of(view_of(tensor), view_of(source), view_of(place))
        assert found is not None and found[0] == box
    if shape and shape[0] == box.sizes[0]:
        found = box_of(view_of(tensor), view_of(view.unflatten(0, (-1, 1))), view_of(target.unflatten(0, (-1, 1))))
        assert found is not None and found[0] == box
    whole = torch.empty(shape)
    found = box_of(view_of(tensor), view_of(tensor.view(-1)), view_of(whole.view(-1)))
    assert found == (Box.whole(shape), found[1]) if found else False


def test_a_view_that_is_no_box_is_none() -> None:
    tensor = View(0, (4, 6), (6, 1))
    for source in (View(0, (2, 6), (12, 1)), View(3, (12,), (1,)), View(0, (2, 6), (0, 1)), View(0, (4, 2), (6, 2))):
        target = torch.empty(source.sizes)
        assert box_of(tensor, source, view_of(target)) is None, source


def test_rows_that_are_interleaved_at_their_place_are_none() -> None:
    rows = torch.empty(6, 4)
    place = torch.empty(6, 4).view(3, 2, 4).transpose(0, 1)
    assert box_of(view_of(rows), view_of(rows.view(2, 3, 4)), view_of(place)) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_left_without_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    left, mask = [Box.whole(shape)], torch.ones(shape, dtype=torch.bool)
    for _ in range(3):
        box = data.draw(boxes(shape))
        index = tuple(map(slice, box.starts, box.stops))
        left, removed = subtract(left, box)
        assert removed == int(mask[index].sum())
        mask[index] = False
    count = torch.zeros(shape, dtype=torch.int)
    for piece in left:
        count[tuple(map(slice, piece.starts, piece.stops))] += 1
    assert torch.equal(count, mask.int())
