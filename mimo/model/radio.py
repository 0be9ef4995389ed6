"""The RADIO vision transformer (Ranzinger et al., arXiv:2312.06709) on its own process groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.data.batch import PackedSequences
from mimo.model.attention import packed_seq_params as attention_params

# Rows and columns of patches of an image.
Grid = tuple[int, int]
# Channels of an image; Megatron Core's patch embedding has no other number.
NUM_CHANNELS = 3


def patch_grids(imgs_sizes: np.ndarray, patch_size: int) -> list[Grid]:
    """Return the rows and columns of patches of each image.

    Args:
        imgs_sizes: int64 `[images, 2]`, height and width in pixels, multiples of `patch_size`.
        patch_size: pixels a side of a patch.
    """
    return [(height // patch_size, width // patch_size) for height, width in imgs_sizes.tolist()]


def check_images(pixel_values: torch.Tensor, image_shape: Sequence[int]) -> None:
    """Raise ValueError unless images have the shape that an encoder takes (channels, height, width)."""
    if pixel_values.ndim != 4 or tuple(pixel_values.shape[1:]) != tuple(image_shape):
        raise ValueError(f"pixel_values has shape {list(pixel_values.shape)}; the encoder takes [images, "
                         f"{', '.join(str(size) for size in image_shape)}] (channels, height, width)")


def check_patches(patches: torch.Tensor, counts: Sequence[int], width: int) -> None:
    """Raise ValueError unless packed patches of `width` values are as many as images of `counts` patches have."""
    if tuple(patches.shape) != (1, sum(counts), width):
        raise ValueError(f"pixel_values has shape {list(patches.shape)}; images of {list(counts)} patches make "
                         f"{[1, sum(counts), width]} (one row, patches, values of a patch)")


def embed_patches(patches: torch.Tensor, counts: Sequence[int],
                  convolution: torch.nn.Conv2d | torch.nn.Conv3d) -> torch.Tensor:
    """Return the embedding `[1, patches, hidden]` of packed patches, `[1, patches, values of a patch]`.

    The convolution's stride equals its kernel, so over patches that are already cut out it is a linear layer.
    """
    weight = convolution.weight.flatten(1)
    check_patches(patches, counts, weight.size(1))
    return torch.nn.functional.linear(patches.to(weight.dtype), weight, convolution.bias)


def interpolate_positions(weight: torch.Tensor, grid: Grid, *, align_corners: bool = False) -> torch.Tensor:
    """Stretch the position embeddings of a square grid over another grid.

    Interpolation is bilinear between the centres of patches, without antialiasing, in float32 or better.

    Args:
        weight: `[side * side, hidden]`, row by row.
        grid: rows and columns of the result, `[rows * columns, hidden]`.
        align_corners: whether the centres of the corner patches coincide, instead of the corners of both grids.
    """
    side = math.isqrt(len(weight))
    if grid == (side, side):
        return weight
    positions_yxh = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(1, side, side, -1)
    # In PyTorch's channels-last format, whose CUDA kernel spreads over the hidden size, too; the other one spreads only
    # over the few positions of the result.
    stretched = torch.nn.functional.interpolate(positions_yxh.permute(0, 3, 1, 2), size=grid, mode="bilinear",
                                                align_corners=align_corners)
    return stretched[0].flatten(1).t().to(weight.dtype)


def packed_positions(weight: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Return the result of `interpolate_positions` for all images, concatenated: `[patches, hidden]`."""
    # Interpolated once for each size: images of one size share the positions, and their gradient.
    by_grid = {grid: interpolate_positions(weight, grid) for grid in dict.fromkeys(grids)}
    return torch.cat([by_grid[grid] for grid in grids])


def pixel_shuffle(features: torch.Tensor, grid: Grid, factor: int) -> torch.Tensor:
    """Join `factor` by `factor` neighbouring patches to one token.

    The order is that of InternVL (https://arxiv.org/abs/2404.16821): the features of a token's patches are
    concatenated row by row.

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
    """Apply `pixel_shuffle` to each image of a packed row.

    Args:
        features: `[patches, hidden]`, image after image.
        grids: rows and columns of each image.
        factor: patches a side of a token.
    """
    images = features.split([rows * columns for rows, columns in grids])
    return torch.cat([pixel_shuffle(image, grid, factor) for image, grid in zip(images, grids, strict=True)])


def cropped_positions(weight: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Return the position embeddings of images, `[rows * columns, hidden]` each.

    The square grid is resized to the image's longer side, and the image takes the top left corner. The published model
    does the same when it does not draw crops (`ViTPatchGenerator._get_pos_embeddings`): bilinear, with
    `align_corners=False`.

    Args:
        weight: `[side * side, hidden]`, row by row.
        grids: rows and columns of patches of each image.
    """
    # Resized once for each side and cropped once for each grid: images of one size share the positions, and their
    # gradient.
    own_side = math.isqrt(len(weight))
    squares = {side: interpolate_positions(weight, (side, side)).view(side, side, -1)
               for side in dict.fromkeys(max(grid) for grid in grids) if side <= own_side}
    by_grid = {grid: squares[max(grid)][:grid[0], :grid[1]].flatten(0, 1) if max(grid) in squares
               else enlarged_positions(weight, grid) for grid in dict.fromkeys(grids)}
    return [by_grid[grid] for grid in grids]


def enlarged_positions(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return `cropped_positions` for an image with more patches along a side than the square grid.

    Only the image's corner is computed, because the whole square of a long, narrow image would not fit in memory.
    """
    side, longer = math.isqrt(len(weight)), max(grid)
    window = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(side, side, -1)
    for axis in sorted((0, 1), key=lambda axis: grid[axis]):  # the shorter one first, for smaller intermediates
        centres = (torch.arange(grid[axis], device=weight.device, dtype=window.dtype) + 0.5) * (side / longer) - 0.5
        centres = centres.clamp(min=0)
        first = centres.long()
        fraction = (centres - first).view(-1, 1, 1) if axis == 0 else (centres - first).view(1, -1, 1)
        window = torch.lerp(window.index_select(axis, first),
                            window.index_select(axis, (first + 1).clamp(max=side - 1)), fraction)
    return window.flatten(0, 1).to(weight.dtype)


class RadioEncoder(RADIOViTModel):
    """Encoder of images to patch features, for images of one size or packed images of any size.

    Parameters, their names and their sharding are Megatron Core's. The forward pass is our own, because Megatron Core's
    changes the packed metadata that it is given, asks the device for the size of every image, resizes the positions for
    each of them, and leaves class tokens and pixel shuffle to the caller.

    Pixel shuffle orders channels as Hugging Face's models of the family do (InternVL's version 2, see
    `mimo.model.radio.pixel_shuffle`), for images of one size and packed ones alike.

    Args:
        config: transformer sizes. `mtp_num_layers` 0 gives a norm after the last layer, None gives none, because
            Megatron Core builds the layers as if a stage followed them.
        layer_spec: the layers.
        patch_size: pixels a side of a patch.
        image_size: height and width of the images in pixels; no effect with dynamic resolution.
        max_image_size: pixels a side of the image that has one position embedding for each of its patches.
        class_token_len: learned tokens before the patches of each image, dropped from the output.
        pg_collection: the module's process groups, with one pipeline stage.
        dynamic_resolution: whether images have any size and are packed.
        pixel_shuffle: patches a side that become one token of the output.
        cpe_augmentation: whether, in training mode, the positions of each image are those of a random crop of the
            square grid, as when the published weights were made. Otherwise training uses the positions of evaluation.
    """

    def __init__(self, config: TransformerConfig, layer_spec: TransformerBlockSubmodules, *, patch_size: int,
                 image_size: tuple[int, int], max_image_size: int, class_token_len: int,
                 pg_collection: ProcessGroupCollection, dynamic_resolution: bool = False, pixel_shuffle: int = 1,
                 cpe_augmentation: bool = False) -> None:
        height, width = (max_image_size, max_image_size) if dynamic_resolution else image_size
        rows, columns = height // patch_size, width // patch_size
        assert max_image_size % patch_size == 0, f"positions for {max_image_size} pixels, patch size {patch_size}"
        assert (rows * patch_size, columns * patch_size) == (height, width), f"{image_size}, patch size {patch_size}"
        assert dynamic_resolution or not (rows % pixel_shuffle or columns % pixel_shuffle), (
            f"{rows} x {columns} patches, pixel shuffle {pixel_shuffle}")
        assert pg_collection.pp.size() == 1, "Megatron Core's RADIO has one pipeline stage"
        super().__init__(
            config, layer_spec, add_class_token=class_token_len > 0, class_token_len=class_token_len,
            patch_dim=patch_size, img_h=height, img_w=width, max_img_h=max_image_size, max_img_w=max_image_size,
            has_cpe=True, embedder_bias=False, dynamic_resolution=dynamic_resolution,
            force_cpe_eval_mode=not cpe_augmentation, interpolate_align_corners=False, pg_collection=pg_collection)
        self.grid, self.image_shape = (rows, columns), (NUM_CHANNELS, height, width)
        self.pixel_shuffle = pixel_shuffle
        if dynamic_resolution:
            # Tokens of an image inside the encoder; 0, because it depends on the image.
            self.seq_length = 0
        with torch.no_grad():
            # Megatron Core draws with a standard deviation of 1, and embedded pixels would then dwarf the positions.
            self.embedder.weight.mul_(self.embedder.weight.size(1)**-0.5)

    def forward(self, pixel_values: torch.Tensor | None = None, imgs_sizes: np.ndarray | None = None,
                packed_seq_params: PackedSequences | None = None) -> torch.Tensor:
        """Encode images.

        Args:
            pixel_values: normalized pixels `[images, 3, height, width]`, any float dtype; with dynamic resolution
                patches `[1, patches, 3 * patch_size ** 2]`, image after image and row by row.
            imgs_sizes: with dynamic resolution int64 `[images, 2]`, height and width in pixels, on the host.
            packed_seq_params: with dynamic resolution one sequence of patches for each image; not changed.

        Returns:
            `[images, tokens, pixel_shuffle ** 2 * hidden]`, packed `[1, tokens of all images, ...]`, in the dtype of
            the parameters.

        Raises:
            ValueError: the images do not have the size that the encoder was built for, or the number of patches does
                not fit `imgs_sizes`.
        """
        assert pixel_values is not None, "the encoder has one stage, which needs pixel_values"
        if not self.dynamic_resolution:
            hidden_snh = self.decoder(hidden_states=self._embed(pixel_values), attention_mask=None)
            hidden_nsh = hidden_snh[self._num_class_tokens:].transpose(0, 1).contiguous()
            return pixel_shuffle(hidden_nsh, self.grid, self.pixel_shuffle)
        assert imgs_sizes is not None and packed_seq_params is not None, "images of any size come with their sizes"
        assert len(packed_seq_params.cu_seqlens) == len(imgs_sizes) + 1, "one sequence for each image"
        grids = patch_grids(imgs_sizes, self.patch_dim)
        hidden_t1h = self.decoder(
            hidden_states=self._embed_packed(pixel_values, grids), attention_mask=None,
            packed_seq_params=attention_params(self._with_class_tokens(packed_seq_params)))
        images = hidden_t1h[:, 0].split([self._num_class_tokens + rows * columns for rows, columns in grids])
        return torch.cat([pixel_shuffle(image[self._num_class_tokens:], grid, self.pixel_shuffle)
                          for image, grid in zip(images, grids, strict=True)])[None]

    @property
    def _num_class_tokens(self) -> int:
        return self.class_token_len if self.add_class_token else 0

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed images: return the first layer's input `[seq_length, images, hidden]`."""
        check_images(pixel_values, self.image_shape)
        (rows, columns), patch, images = self.grid, self.patch_dim, len(pixel_values)
        patches = pixel_values.reshape(images, NUM_CHANNELS, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        hidden_nsh, _ = self.embedder(patches.reshape(images, rows * columns, -1).to(self.embedder.weight.dtype))
        if self._draws_crops:
            hidden_nsh = hidden_nsh + self.get_pos_enc(images, input_size=self.image_shape[1:])
        else:
            hidden_nsh = hidden_nsh + cropped_positions(self.position_embeddings[0], [self.grid])[0]
        if self.add_class_token:
            hidden_nsh = torch.cat([self.class_token.expand(images, -1, -1), hidden_nsh], dim=1)
        return hidden_nsh.transpose(0, 1).contiguous()

    def _embed_packed(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Embed packed patches: return the first layer's input `[tokens, 1, hidden]`, with class tokens."""
        counts = [rows * columns for rows, columns in grids]
        check_patches(patches, counts, NUM_CHANNELS * self.patch_dim**2)
        hidden_nsh, _ = self.embedder(patches.to(self.embedder.weight.dtype))
        if self._draws_crops:
            positions = [self.get_pos_enc(1, input_size=(rows * self.patch_dim, columns * self.patch_dim))[0]
                         for rows, columns in grids]
        else:
            positions = cropped_positions(self.position_embeddings[0], grids)
        hidden_th = hidden_nsh[0] + torch.cat(positions)
        if self.add_class_token:
            # One expanded tensor instead of one parameter many times, so that its gradient is one sum.
            class_tokens = self.class_token.expand(len(grids), -1, -1).unbind()
            pieces: list[Any] = []
            for class_token, image in zip(class_tokens, hidden_th.split(counts), strict=True):
                pieces += [class_token, image]
            hidden_th = torch.cat(pieces)
        return hidden_th[:, None]

    @property
    def _draws_crops(self) -> bool:
        return self.training and not self.force_cpe_eval_mode

    def _with_class_tokens(self, sequences: PackedSequences) -> PackedSequences:
        """Return the sequences that attend to themselves: each image's class tokens and patches."""
        starts, count = sequences.cu_seqlens, self._num_class_tokens
        shifts = torch.arange(len(starts), dtype=starts.dtype, device=starts.device) * count
        return replace(sequences, cu_seqlens=starts + shifts, max_seqlen=sequences.max_seqlen + count)
