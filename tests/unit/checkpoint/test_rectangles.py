"""Flat ranges of a tensor, such as a distributed optimizer owns, as rectangles of it."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.spawn import WorkerPool


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a range of its elements in row-major order, empty ones and reversed ones too."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    size = int(np.prod(shape))
    return shape, draw(st.integers(0, size)), draw(st.integers(0, size))


def check_rectangles(rank: int) -> None:
    from mimo.checkpoint.entries import rectangles

    @settings(max_examples=600, deadline=None, database=None)
    @example(((1, 1, 1), 0, 1))
    @example(((4, 5, 6), 0, 120))
    @example(((4, 5, 6), 119, 120))
    @given(flat_ranges())
    def tile_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
        shape, begin, end = case
        order = np.arange(np.prod(shape)).reshape(shape)
        place = begin
        found = list(rectangles(shape, begin, end))
        for offsets, sizes, low, high in found:
            assert len(offsets) == len(sizes) == len(shape) and min(sizes) >= 1
            inside = order[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            assert inside.shape == sizes
            assert low == place and np.array_equal(inside.ravel(), np.arange(low, high)), "in order, without a gap"
            place = high
        assert place == max(begin, end) or not found and begin >= end
        assert len(found) <= 2 * len(shape) - 1

    tile_the_range()


def test_rectangles_tile_any_flat_range(pool: WorkerPool) -> None:
    pool.run(check_rectangles)
