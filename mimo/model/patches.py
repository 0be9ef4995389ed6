"""Patches of images of any size: where they lie in a packed row, their positions, and how they become tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

Grid = tuple[int, int]
"""Rows and columns of patches of an image."""


def patch_grids(imgs_sizes: np.ndarray, patch_size: int) -> list[Grid]:
    """Patch rows and columns of each image.

    Args:
        imgs_sizes: int64 `[images, 2]`, height and width in pixels.
        patch_size: pixels a side of a patch; divides them.
    """
    return [(height // patch_size, width // patch_size) for height, width in imgs_sizes.tolist()]


def interpolate_positions(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Position embeddings of a square grid stretched over another one, `[rows * columns, hidden]`, row by row.

    Bilinear between the centres of patches (`align_corners=False`, no antialiasing), in float32 or better.

    Args:
        weight: `[side * side, hidden]`, row by row.
        grid: rows and columns asked for.
    """
    side = math.isqrt(len(weight))
    if grid == (side, side):
        return weight
    positions_hyx = weight.to(torch.promote_types(weight.dtype, torch.float32)).t().view(1, -1, side, side)
    stretched = torch.nn.functional.interpolate(positions_hyx, size=grid, mode="bilinear", align_corners=False)
    return stretched[0].flatten(1).t().to(weight.dtype)


def packed_positions(weight: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """`interpolate_positions` of each image, one behind the other: `[patches, hidden]`."""
    # Interpolated once a size: images of one size share it, and its gradient.
    by_grid = {grid: interpolate_positions(weight, grid) for grid in dict.fromkeys(grids)}
    return torch.cat([by_grid[grid] for grid in grids])


def pixel_shuffle(features: torch.Tensor, grid: Grid, factor: int) -> torch.Tensor:
    """Neighbouring patches, `factor` by `factor` of them, as one token.

    The order is that of InternVL (https://arxiv.org/abs/2404.16821): the features of a token's patches one behind the
    other, row by row.

    Args:
        features: `[..., rows * columns, hidden]`, row by row.
        grid: rows and columns, multiples of `factor`.
        factor: patches a side of a token.

    Returns:
        `[..., rows / factor * columns / factor, factor * factor * hidden]`, row by row.
    """
    if factor == 1:
        return features
    (rows, columns), leading = grid, features.shape[:-2]
    blocks = features.reshape(*leading, rows // factor, factor, columns // factor, factor, features.size(-1))
    return blocks.transpose(-4, -3).reshape(*leading, rows * columns // factor**2, factor**2 * features.size(-1))


def packed_pixel_shuffle(features: torch.Tensor, grids: Sequence[Grid], factor: int) -> torch.Tensor:
    """`pixel_shuffle` of each image of a packed row.

    Args:
        features: `[patches, hidden]`, image after image.
        grids: rows and columns of each image.
        factor: patches a side of a token.
    """
    images = features.split([rows * columns for rows, columns in grids])
    return torch.cat([pixel_shuffle(image, grid, factor) for image, grid in zip(images, grids, strict=True)])
