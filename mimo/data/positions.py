"""Positions of tokens with three axes (time, row, column), as decoders of the Qwen-VL families rotate them.

A text token has one position on all three axes. The tokens of an image share the time, and have their own row and
column. Text after an image or a video continues one past the largest position on any axis, as in vLLM and in
transformers up to 5.2. Later releases of transformers continue past a video by its height and width alone, which makes
no difference for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_AXES = 3


@dataclass(frozen=True)
class TokenGrid:
    """Language tokens of an image or a video, frame by frame and row by row.

    Attributes:
        rows: rows of tokens.
        columns: tokens of a row.
        frames: frames in time; 1 for an image.
        frame_step: difference in time position between two frames.
    """

    rows: int
    columns: int
    frames: int = 1
    frame_step: float = 1.0

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.frames * self.rows * self.columns


def multimodal_positions(lengths: Sequence[int], images: Sequence[tuple[int, TokenGrid]]) -> np.ndarray:
    """Return the positions of the tokens of a row, int64 `[3, tokens]`; each sequence starts at 0.

    Args:
        lengths: tokens of each sequence of the row, in order.
        images: for each image, its first token's index in the row and its grid; in order. An image lies inside one
            sequence.
    """
    row = np.empty((NUM_AXES, sum(lengths)), np.int64)
    left = list(reversed(images))
    start = 0
    for length in lengths:
        position, index, stop = 0, start, start + length
        while index < stop:
            # Text up to the next image of the sequence, then the image.
            first = left[-1][0] if left and left[-1][0] < stop else stop
            row[:, index:first] = position + np.arange(first - index)
            position, index = position + first - index, first
            if first < stop:
                grid = left.pop()[1]
                row[:, first : first + grid.size] = position + grid_positions(grid)
                index = first + grid.size
                position = int(row[:, first:index].max()) + 1
        assert index == stop, f"an image ends at {index}, its sequence at {stop}"
        start = stop
    assert not left, f"images {left} lie behind the last sequence"
    return row


def grid_positions(grid: TokenGrid) -> np.ndarray:
    """Return time, row and column of the tokens of a grid, from 0, int64 `[3, tokens]`: frame by frame, row by row."""
    # In float64, where the product is exact. Rounded to float32 first, some times would floor to another position.
    times = np.floor(np.arange(grid.frames) * grid.frame_step).astype(np.int64)
    return np.stack([axis.ravel() for axis in np.meshgrid(
        times, np.arange(grid.rows), np.arange(grid.columns), indexing="ij")])
