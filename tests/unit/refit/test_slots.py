"""Boxes, addresses and tables of a refit, against numpy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.refit.tensor_slices import (
    Address,
    Box,
    RecvSpec,
    TensorMeta,
    TensorSlice,
    contiguous_strides,
    entry_as_json,
    entry_from_json,
    slot_as_json,
    slot_from_json,
)

SHAPE = (4, 3, 5)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
    return Box(tuple(start for start, _ in ends), tuple(stop for _, stop in ends))


@given(boxes(), boxes())
def test_boxes_share_what_both_index(one: Box, other: Box) -> None:
    inside = np.zeros(SHAPE, int)
    inside[slices(one)] += 1
    assert inside.sum() == one.numel and inside[slices(one)].shape == one.sizes
    inside[slices(other)] += 1
    shared = one.intersection(other)
    expected = np.zeros(SHAPE, int)
    if shared:
        expected[slices(shared)] = 1
    assert (shared is None) == (not (inside == 2).any()) and np.array_equal(inside == 2, expected == 1)
    assert Box.whole(SHAPE).intersection(one) == (one if one.numel else None)


def test_a_scalar_is_one_element() -> None:
    assert Box.whole(()).numel == 1 and Box.whole(()).intersection(Box.whole(())) == Box.whole(())
    assert contiguous_strides(()) == () and Address("a", 7, ()).inside(Box.whole(()), Box.whole(())).offset == 7


@given(boxes(), boxes())
def test_an_address_moves_with_its_box(outer: Box, other: Box) -> None:
    inner = outer.intersection(other)
    if inner is None:
        return
    whole = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    local = np.ascontiguousarray(whole[slices(outer)])
    address = Address("local", 0, contiguous_strides(outer.sizes))
    assert address.strides == tuple(stride // 8 for stride in np.empty(outer.sizes, np.int64).strides)
    moved = address.inside(outer, inner)
    found = np.lib.stride_tricks.as_strided(local.reshape(-1)[moved.offset:], inner.sizes,
                                            [stride * local.itemsize for stride in moved.strides])
    assert np.array_equal(found, whole[slices(inner)])


def test_boxes_of_other_tensors_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="1 and 2 axes"):
        Box.whole((3,)).intersection(Box.whole((3, 3)))


def test_slots_and_entries_survive_json() -> None:
    slot = TensorSlice("a", Box((0, 2), (4, 6)), Address("fused", 12, (8, 1)))
    wants = RecvSpec((slot,), ("b", "c"))
    assert slot_from_json(json.loads(json.dumps(slot_as_json(slot)))) == slot
    moved = RecvSpec((TensorSlice("a", slot.box, Address("fused", 13, (8, 1))),), ("b", "c"))
    assert moved.digest() != wants.digest() != RecvSpec((slot,), ("c", "b")).digest()
    entry = TensorMeta("a", "float32", (2, 3), keep_fp32=True)
    assert entry_from_json(json.loads(json.dumps(entry_as_json(entry)))) == entry


def test_bytes_are_those_of_the_wire() -> None:
    sizes = [TensorMeta("a", dtype, (3, 5)).num_bytes for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    assert sizes == [60, 30, 15]
