"""The input of an encoder as tensors: whole images, tiles or packed patches, of one lane or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from mimo.data.batch import PackedSequences
from mimo.protocols import TokenSpec
from mimo.visual import ImageSize, Tiles, num_pictures

# For each field of `EncoderBatch.inputs`, the axis on which the tensors of several lanes are concatenated. Shapes
# cannot tell it, because tensors that happen to be equally long could also be stacked.
WHOLE_IMAGES = {"pixel_values": 0, "imgs_sizes": 0, "tile_counts": 0}
PACKED_PATCHES = {"pixel_values": 1, "imgs_sizes": 0}
PACKED_SEQ_PARAMS = "packed_seq_params"


def whole_images(images: Sequence[np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """Return images of one size, `[C, H, W]` each, as `pixel_values` `[images, C, H, W]`; empty without images."""
    return {"pixel_values": torch.from_numpy(np.stack(images)).to(dtype)} if images else {}


def tiled_images(images: Sequence[np.ndarray] | None, sizes: Sequence[ImageSize], tiles: Tiles,
                 dtype: torch.dtype) -> dict[str, Any]:
    """Return images that are cut into tiles, `[tiles, C, H, W]` each, as an encoder's inputs; see `EncoderBatch`.

    Without `images`, the inputs have only their sizes and numbers of tiles.
    """
    if not sizes:
        return {}
    inputs = {} if images is None else {"pixel_values": torch.from_numpy(np.concatenate(images)).to(dtype)}
    return inputs | {"imgs_sizes": np.array(sizes, np.int64),
                     "tile_counts": np.array([tiles.count(*size[:2]) for size in sizes], np.int64)}


@dataclass(frozen=True)
class PatchOrder:
    """How images become patches: the fields of the same names in `TokenSpec`."""

    patch_size: int
    merge_size: int = 1
    temporal_patch_size: int = 1

    @classmethod
    def of(cls, tokens: TokenSpec) -> PatchOrder | None:
        """Return the patches that an encoder takes; None if it takes whole images."""
        if not tokens.packs_patches:
            return None
        return cls(tokens.patch_size, tokens.merge_size, tokens.temporal_patch_size)


def patchify(pixels: np.ndarray, order: PatchOrder) -> np.ndarray:
    """Cut an image `[C, H, W]` or a video `[F, C, H, W]` into patches `[patches, C * T * P * P]`.

    A patch is a flat `[C, T, P, P]`. Its T frames are the image itself, or T frames of the video. Patches come row by
    row, or with a merge size above 1 block by block, each block row by row. A video is one such image after the other.
    """
    patch, merge, together = order.patch_size, order.merge_size, order.temporal_patch_size
    video = np.broadcast_to(pixels, (together, *pixels.shape)) if pixels.ndim == 3 else pixels
    frames, channels, height, width = video.shape
    assert height % (patch * merge) == 0 and width % (patch * merge) == 0 and frames % together == 0, (
        pixels.shape, order)
    grid = video.reshape(frames // together, together, channels, height // (patch * merge), merge, patch,
                         width // (patch * merge), merge, patch)
    return grid.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * together * patch**2)


def unpatchify(patches: np.ndarray, size: tuple[int, int], order: PatchOrder) -> np.ndarray:
    """Return the image of `[C, height, width]` whose patches these are; of a temporal patch, its first frame."""
    (height, width), patch, merge, frames = size, order.patch_size, order.merge_size, order.temporal_patch_size
    channels = patches.shape[1] // (frames * patch**2)
    single = patches.reshape(-1, channels, frames, patch**2)[:, :, 0]
    grid = single.reshape(height // (patch * merge), width // (patch * merge), merge, merge, channels, patch, patch)
    return grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(channels, height, width)


def packed_patches(images: Sequence[np.ndarray] | None, sizes: Sequence[ImageSize], order: PatchOrder,
                   dtype: torch.dtype) -> dict[str, Any]:
    """Return images of any size, and videos, as one sequence of patches.

    Args:
        images: `[C, height, width]` of each image, `[frames, C, height, width]` of each video; None if only their sizes
            are needed.
        sizes: size of each, multiples of the patch size.
        order: how they become patches.
        dtype: dtype of the patches.

    Returns:
        The fields of packed patches in `EncoderBatch.inputs`, `pixel_values` only with images; empty without sizes.
    """
    if not sizes:
        return {}
    # The layers of an encoder never look from one temporal patch to another, so it takes each as an image.
    imgs_sizes = np.array([size[:2] for size in sizes for _ in range(num_pictures(size, order.temporal_patch_size))],
                          np.int64)
    patches = (imgs_sizes // order.patch_size).prod(axis=1)
    inputs: dict[str, Any] = {}
    if images is not None:
        pixels = np.concatenate([patchify(image, order) for image in images])
        inputs["pixel_values"] = torch.from_numpy(pixels)[None].to(dtype)
    cu_seqlens = torch.tensor([0, *patches.cumsum()], dtype=torch.int32)
    return inputs | {"imgs_sizes": imgs_sizes, PACKED_SEQ_PARAMS: PackedSequences(cu_seqlens, int(patches.max()))}


def merge_sequences(parts: Sequence[PackedSequences]) -> PackedSequences:
    """Concatenate packed sequences."""
    starts, offset = [parts[0].cu_seqlens[:1]], 0
    for part in parts:
        starts.append(part.cu_seqlens[1:] + offset)
        offset += int(part.cu_seqlens[-1])
    return PackedSequences(torch.cat(starts), max(part.max_seqlen for part in parts))


def merge_inputs(lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the inputs of several lanes, in lane order. Lanes without images are empty.

    Raises:
        TypeError: there is no rule for a field, or the lanes do not have the same fields.
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


def split_images(inputs: Mapping[str, Any]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """Take an encoder's inputs apart, image by image; the inverse of `join_images`.

    Returns:
        Height and width in pixels of each image, or temporal patch of a video, with its pixels: `[C, H, W]`, `[tiles,
        C, H, W]`, or `[patches, channels]` where the encoder takes packed patches. The tensors are views.
    """
    if not inputs:
        return []
    pixels = inputs["pixel_values"]
    if "imgs_sizes" not in inputs:
        return [((image.shape[1], image.shape[2]), image) for image in pixels]
    sizes = [(int(height), int(width)) for height, width in inputs["imgs_sizes"]]
    if "tile_counts" in inputs:
        return list(zip(sizes, pixels.split(inputs["tile_counts"].tolist()), strict=True))
    # Patches are square and all of one size, so an image has its share of them by area.
    area = sum(height * width for height, width in sizes)
    lengths = [height * width * pixels.shape[1] // area for height, width in sizes]
    return list(zip(sizes, pixels[0].split(lengths), strict=True))


def join_images(pixels: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Make an encoder's inputs of single images, on the device where they are."""
    if pixels[0].ndim == 3:
        return {"pixel_values": torch.stack(list(pixels))}
    if pixels[0].ndim == 4:
        return {"pixel_values": torch.cat(list(pixels)), "imgs_sizes": np.array(sizes, np.int64),
                "tile_counts": np.array([len(image) for image in pixels], np.int64)}
    lengths = [patches.shape[0] for patches in pixels]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"pixel_values": torch.cat(list(pixels))[None], "imgs_sizes": np.array(sizes, np.int64),
            PACKED_SEQ_PARAMS: PackedSequences(starts.to(pixels[0].device, non_blocking=True), max(lengths))}
