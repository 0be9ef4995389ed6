"""The vision tower of Qwen3-VL (https://arxiv.org/abs/2511.21631) on its own process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.data.batch import PackedSequences
from mimo.model.packed_attention import packed_seq_params as attention_params
from mimo.model.qwen_vision import axial_angles, block_order
from mimo.model.radio import Grid, interpolate_positions, patch_grids


class Qwen3VisionTower(MegatronModule):
    """Images of any size to features of blocks of patches, at the last layer and at some before it (DeepStack).

    Patches come block by block, so that the patches of a language token are neighbours. Patch embedding, positions and
    norms are replicated over tensor-parallel ranks.

    Args:
        config: transformer sizes; `num_layers` counts the layers of all pipeline stages.
        layer_spec: this stage's layers, with levels (`mimo.model.deepstack.encoder_with_levels`).
        num_levels: layers whose output becomes a level, on all stages.
        patch_size: pixels a side of a patch.
        temporal_patch_size: frames of a patch; an image is so many equal frames.
        merge_size: patches a side of a block, which becomes one language token.
        position_side: patches a side of the square grid of learned positions.
        num_channels: image channels.
        rotary_base: base of the rotary frequencies.
        pg_collection: the module's process groups.
        pre_process: this rank holds the first pipeline stage.
        post_process: this rank holds the last pipeline stage.
    """

    seq_length = 0
    """Tokens of an image inside the encoder; that depends on the image."""

    def __init__(self, config: TransformerConfig, layer_spec: TransformerBlockSubmodules, *, num_levels: int,
                 patch_size: int, temporal_patch_size: int, merge_size: int, position_side: int, num_channels: int,
                 rotary_base: float, pg_collection: ProcessGroupCollection, pre_process: bool = True,
                 post_process: bool = True) -> None:
        super().__init__(config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = pre_process, post_process
        self.num_levels, self.patch_size, self.merge_size = num_levels, patch_size, merge_size
        self.head_channels, self.rotary_base = config.hidden_size // config.num_attention_heads, rotary_base
        if pre_process:
            hidden, dtype, device = config.hidden_size, config.params_dtype, torch.cuda.current_device()
            kernel = (temporal_patch_size, patch_size, patch_size)
            self.conv1 = torch.nn.Conv3d(num_channels, hidden, kernel_size=kernel, stride=kernel, dtype=dtype,
                                         device=device)
            self.position_embeddings = torch.nn.Embedding(position_side**2, hidden, dtype=dtype, device=device)
            config.init_method(self.conv1.weight)
            config.init_method(self.position_embeddings.weight)
            assert self.conv1.bias is not None
            torch.nn.init.zeros_(self.conv1.bias)
        self.decoder = TransformerBlock(config, layer_spec, post_layer_norm=False, pre_process=pre_process,
                                        post_process=post_process, pg_collection=pg_collection)

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Set what a later pipeline stage works on, the output of the one before; None on the first."""
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, pixel_values: torch.Tensor | None = None, imgs_sizes: np.ndarray | None = None,
                packed_seq_params: PackedSequences | None = None) -> torch.Tensor:
        """Run this pipeline stage.

        Args:
            pixel_values: patches `[1, patches, channels * frames * patch_size ** 2]`, image after image, block by block
                and row by row inside a block. Read on the first stage only.
            imgs_sizes: int64 `[images, 2]`, height and width in pixels, on the host.
            packed_seq_params: one sequence of patches an image.

        Returns:
            On the last stage `[1, tokens of all images, (1 + levels) * merge_size ** 2 * hidden]`: the patches of each
            token at the last layer, then those at each level. On the others `[patches, 1, columns]`, where the levels
            so far are behind the hidden states. In the dtype of the parameters.

        Raises:
            ValueError: the patches are not those of `imgs_sizes`.
        """
        assert imgs_sizes is not None and packed_seq_params is not None, "images of any size come with their sizes"
        assert len(packed_seq_params.cu_seqlens) == len(imgs_sizes) + 1, "one sequence an image"
        grids = patch_grids(imgs_sizes, self.patch_size)
        hidden_p1h = None
        if self.pre_process:
            assert pixel_values is not None, "the first pipeline stage needs pixel_values"
            hidden_p1h = self._embed(pixel_values, grids)
        hidden_p1h = self.decoder(hidden_states=hidden_p1h, attention_mask=None, rotary_pos_emb=self._angles(grids),
                                  packed_seq_params=attention_params(packed_seq_params))
        if not self.post_process:
            return hidden_p1h
        by_patch: Any = hidden_p1h.view(-1, self.merge_size**2, 1 + self.num_levels, self.config.hidden_size)
        return by_patch.transpose(1, 2).flatten(1)[None]

    def _embed(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches to the first layer's input `[patches, 1, hidden]`."""
        # The convolution's stride is its kernel: over patches that are already cut out it is a linear layer.
        weight, counts = self.conv1.weight.flatten(1), [rows * columns for rows, columns in grids]
        if tuple(patches.shape) != (1, sum(counts), weight.size(1)):
            raise ValueError(f"pixel_values has shape {list(patches.shape)}; images of {counts} patches make "
                             f"{[1, sum(counts), weight.size(1)]} (one row, patches, channels * frames * patch size ** "
                             "2)")
        hidden_ph = torch.nn.functional.linear(patches[0].to(weight.dtype), weight, self.conv1.bias)
        # Once a size: images of one size share the interpolated positions, and their gradient.
        table = self.position_embeddings.weight
        positions = {grid: block_order(interpolate_positions(table, grid, align_corners=True), grid, self.merge_size)
                     for grid in dict.fromkeys(grids)}
        return (hidden_ph + torch.cat([positions[grid] for grid in grids]))[:, None]

    def _angles(self, grids: list[Grid]) -> torch.Tensor:
        """Return the rotary angles of all patches, float32 `[patches, 1, 1, channels of a head]`."""
        device = torch.cuda.current_device()
        by_grid = {grid: axial_angles(grid, self.merge_size, self.head_channels, self.rotary_base, device)
                   for grid in dict.fromkeys(grids)}
        return torch.cat([by_grid[grid] for grid in grids])[:, None, None]
