"""What an encoder takes of a microbatch: the images of each lane as tensors, and the lanes of a rank as one batch.

How each field of several lanes becomes one is written down here, field by field. It is never guessed from shapes: two
lanes whose tensors happen to be equally long would be stacked instead of joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mimo.batch import PackedSequences

# The fields of `EncoderBatch.inputs`; the axis on which lanes are joined, where a field has one.
WHOLE_IMAGES = {"pixel_values": 0}
PACKED_PATCHES = {"pixel_values": 1, "imgs_sizes": 0}
PACKED_SEQ_PARAMS = "packed_seq_params"


def whole_images(images: Sequence[np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """Images of one size, float32 `[C, H, W]` each, as `pixel_values` `[images, C, H, W]`; empty without images."""
    return {"pixel_values": torch.from_numpy(np.stack(images)).to(dtype)} if images else {}


def patchify(image: np.ndarray, patch_size: int) -> np.ndarray:
    """An image `[C, H, W]` as patches `[H / P * W / P, C * P * P]`, row by row; a patch is flattened as `[C, P, P]`."""
    channels, height, width = image.shape
    assert height % patch_size == 0 and width % patch_size == 0, (image.shape, patch_size)
    grid = image.reshape(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * patch_size**2)


def packed_patches(images: Sequence[np.ndarray] | None, sizes: Sequence[tuple[int, int]], patch_size: int,
                   dtype: torch.dtype) -> dict[str, Any]:
    """Images of any size as one sequence of patches.

    Args:
        images: float32 `[C, height, width]` each; None where only their sizes are needed.
        sizes: `(height, width)` of each image, multiples of `patch_size`.
        patch_size: pixels a side of a patch.
        dtype: dtype of the patches.

    Returns:
        The fields of packed patches in `EncoderBatch.inputs`, `pixel_values` only with images; empty without sizes.
    """
    if not sizes:
        return {}
    imgs_sizes = np.array(sizes, np.int64)
    patches = (imgs_sizes // patch_size).prod(axis=1)
    inputs: dict[str, Any] = {}
    if images is not None:
        pixels = np.concatenate([patchify(image, patch_size) for image in images])
        inputs["pixel_values"] = torch.from_numpy(pixels)[None].to(dtype)
    cu_seqlens = torch.tensor([0, *patches.cumsum()], dtype=torch.int32)
    return inputs | {"imgs_sizes": imgs_sizes, PACKED_SEQ_PARAMS: PackedSequences(cu_seqlens, int(patches.max()))}


def merge_sequences(parts: Sequence[PackedSequences]) -> PackedSequences:
    """Packed sequences one behind the other: starts shifted by what lies before, the longest of all."""
    starts, offset = [parts[0].cu_seqlens[:1]], 0
    for part in parts:
        starts.append(part.cu_seqlens[1:] + offset)
        offset += int(part.cu_seqlens[-1])
    return PackedSequences(torch.cat(starts), max(part.max_seqlen for part in parts))


def merge_inputs(lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of several lanes as one batch, in lane order. Lanes without images are empty.

    Raises:
        TypeError: a field that has no rule, or lanes that do not have the same fields.
    """
    present = [lane for lane in lanes if lane]
    if not present:
        return {}
    fields = list(present[0])
    for lane in present:
        if lane.keys() != present[0].keys():
            raise TypeError(f"lanes of one encoder with the fields {fields} and {list(lane)} cannot be merged")
    axes = PACKED_PATCHES if PACKED_SEQ_PARAMS in fields else WHOLE_IMAGES
    merged: dict[str, Any] = {}
    for name in fields:
        values = [lane[name] for lane in present]
        if name == PACKED_SEQ_PARAMS and all(isinstance(value, PackedSequences) for value in values):
            merged[name] = merge_sequences(values)
        elif name in axes and all(isinstance(value, torch.Tensor) for value in values):
            merged[name] = values[0] if len(values) == 1 else torch.cat(values, dim=axes[name])
        elif name in axes and all(isinstance(value, np.ndarray) for value in values):
            merged[name] = np.concatenate(values, axis=axes[name])
        else:
            raise TypeError(f"encoder input {name!r} ({type(values[0]).__name__}): there is no rule for merging lanes")
    return merged
