"""The vision towers of Qwen2.5-VL (https://arxiv.org/abs/2502.13923) and Qwen3-VL (https://arxiv.org/abs/2511.21631).

No layer attends from one temporal patch of a video to another, so each is treated as an image. In Qwen2.5-VL most
layers attend within windows of an image, and a few within the whole image. All layers see the patches in the order of
the windows, so that windows and images are both sequences of one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from mimo.data.batch import PackedSequences
from mimo.model.attention import packed_seq_params as attention_params
from mimo.model.radio import Grid, embed_patches, interpolate_positions, patch_grids


def block_order(rows: torch.Tensor, grid: Grid, size: int) -> torch.Tensor:
    """Reorder patches `[rows * columns, ...]` from row by row to block by block of `size` by `size` patches."""
    blocks = rows.reshape(grid[0] // size, size, grid[1] // size, size, *rows.shape[1:])
    return blocks.transpose(1, 2).reshape(rows.shape)


def axial_angles(grid: Grid, size: int, channels: int, base: float, device: Any) -> torch.Tensor:
    """Return the rotary angles of an image's patches, float32 `[patches, channels]`, block by block.

    The first half of the frequencies follows a patch's row, the second half its column. The angles come twice, because
    Megatron Core rotates channel i with channel i + channels / 2.

    Args:
        grid: rows and columns of patches.
        size: patches a side of a block.
        channels: channels of a head.
        base: base of the frequencies.
        device: device of the result.
    """
    frequencies = base ** -(torch.arange(0, channels // 2, 2, dtype=torch.float32, device=device) / (channels // 2))
    row, column = torch.meshgrid(*(torch.arange(count, device=device) for count in grid), indexing="ij")
    positions = block_order(torch.stack([row, column], dim=-1).flatten(0, 1), grid, size)
    angles = (positions[:, :, None] * frequencies).flatten(1)
    return torch.cat([angles, angles], dim=-1)


@lru_cache(maxsize=4096)
def image_windows(rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut an image into windows. The last ones of a row or column may be smaller.

    Args:
        rows: rows of blocks.
        columns: blocks of a row.
        side: blocks a side of a window.

    Returns:
        Blocks in the order of the windows, as indices row by row, and the number of blocks of each window.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    return window.argsort(kind="stable"), np.bincount(window)


@dataclass
class Windows:
    """Windows of the images of a packed row.

    Attributes:
        order: int64 `[blocks]`, the blocks in the order of the windows.
        inverse: int64 `[blocks]`, the index of each block in that order.
        sequences: one sequence of patches for each window.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    sequences: PackedSequences

    @classmethod
    def of(cls, grids: list[Grid], merge_size: int, side: int) -> Windows:
        """Find the windows of images of (rows, columns) patches; `side` counts blocks of `merge_size` patches."""
        orders, lengths, blocks = [], [], 0
        for grid in grids:
            order, counts = image_windows(grid[0] // merge_size, grid[1] // merge_size, side)
            orders.append(order + blocks)
            lengths.append(counts * merge_size**2)
            blocks += len(order)
        order, patches = np.concatenate(orders), np.concatenate(lengths)
        starts = torch.from_numpy(np.concatenate([[0], patches.cumsum()]).astype(np.int32))

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(torch.cuda.current_device(), non_blocking=True)

        return cls(on_device(order), on_device(order.argsort()),
                   PackedSequences(starts.to(torch.cuda.current_device(), non_blocking=True), int(patches.max())))


@dataclass
class WindowedSequences(PackedSeqParams):
    """Sequences of whole images, with those of their windows.

    Attributes:
        windows: one sequence for each window.
    """

    windows: PackedSeqParams | None = None


class WindowedLayer(TransformerLayer):
    """A layer that attends within windows, unless it is one of those that attend within whole images.

    Args:
        whole_image_layers: numbers of these layers, from 0, over all pipeline stages.
        arguments: those of Megatron Core's layer.
    """

    def __init__(self, *arguments: Any, whole_image_layers: frozenset[int], **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.attends_windows = self.layer_number - 1 not in whole_image_layers

    def forward(self, *arguments: Any, packed_seq_params: WindowedSequences, **keywords: Any) -> Any:
        chosen = packed_seq_params.windows if self.attends_windows else packed_seq_params
        return super().forward(*arguments, packed_seq_params=chosen, **keywords)


class QwenVisionTower(MegatronModule):
    """Encoder of images of any size, and of temporal patches of videos, to features of blocks of patches.

    Patches come block by block, so that the patches of a language token are neighbours. Patch embedding, positions and
    norms are replicated over tensor-parallel ranks.

    Args:
        config: transformer sizes; `num_layers` counts the layers of all pipeline stages.
        layer_spec: this stage's layers.
        patch_size: pixels a side of a patch.
        temporal_patch_size: frames of a patch; an image counts as this many equal frames.
        merge_size: patches a side of a block, which becomes one language token.
        num_channels: image channels.
        rotary_base: base of the rotary frequencies.
        pg_collection: the module's process groups.
        position_side: patches a side of the square grid of learned positions; 0: there are none.
        conv_bias: whether the patch embedding has a bias.
        pre_process: whether this rank holds the first pipeline stage.
        post_process: whether this rank holds the last pipeline stage.
    """

    seq_length = 0
    """Tokens of an image inside the encoder; 0, because it depends on the image."""

    def __init__(self, config: TransformerConfig, layer_spec: TransformerBlockSubmodules, *, patch_size: int,
                 temporal_patch_size: int, merge_size: int, num_channels: int, rotary_base: float,
                 pg_collection: ProcessGroupCollection, position_side: int = 0, conv_bias: bool = False,
                 pre_process: bool = True, post_process: bool = True) -> None:
        super().__init__(config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = pre_process, post_process
        self.patch_size, self.merge_size = patch_size, merge_size
        self.head_channels, self.rotary_base = config.hidden_size // config.num_attention_heads, rotary_base
        self.position_embeddings: torch.nn.Embedding | None = None
        if pre_process:
            hidden, dtype, device = config.hidden_size, config.params_dtype, torch.cuda.current_device()
            kernel = (temporal_patch_size, patch_size, patch_size)
            self.conv1 = torch.nn.Conv3d(num_channels, hidden, kernel_size=kernel, stride=kernel, bias=conv_bias,
                                         dtype=dtype, device=device)
            config.init_method(self.conv1.weight)
            if self.conv1.bias is not None:
                torch.nn.init.zeros_(self.conv1.bias)
            if position_side:
                self.position_embeddings = torch.nn.Embedding(position_side**2, hidden, dtype=dtype, device=device)
                config.init_method(self.position_embeddings.weight)
        self.decoder = TransformerBlock(config, layer_spec, post_layer_norm=False, pre_process=pre_process,
                                        post_process=post_process, pg_collection=pg_collection)

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Set the input of a later pipeline stage, which is the output of the one before; None on the first stage."""
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, pixel_values: torch.Tensor | None = None, imgs_sizes: np.ndarray | None = None,
                packed_seq_params: PackedSequences | None = None) -> torch.Tensor:
        """Run this pipeline stage.

        Args:
            pixel_values: patches `[1, patches, channels * frames * patch_size ** 2]`, image after image, block by block
                and row by row inside a block. Read on the first stage only.
            imgs_sizes: int64 `[images, 2]`, height and width in pixels, on the host.
            packed_seq_params: one sequence of patches for each image.

        Returns:
            On the last stage `[1, tokens of all images, features]`, the patches of each token side by side. On the
            others `[patches, 1, columns]`, the input of the next stage. The dtype is that of the parameters.

        Raises:
            ValueError: the number of patches does not fit `imgs_sizes`.
        """
        assert imgs_sizes is not None and packed_seq_params is not None, "images of any size come with their sizes"
        assert len(packed_seq_params.cu_seqlens) == len(imgs_sizes) + 1, "one sequence for each image"
        grids, sequences = patch_grids(imgs_sizes, self.patch_size), attention_params(packed_seq_params)
        assert sequences is not None
        hidden_ph = None
        if self.pre_process:
            assert pixel_values is not None, "the first pipeline stage needs pixel_values"
            hidden_ph = self._embed(pixel_values, grids)
        return self._run(hidden_ph, self._angles(grids), sequences, grids)

    def _run(self, hidden_ph: torch.Tensor | None, angles: torch.Tensor, sequences: PackedSeqParams,
             grids: list[Grid]) -> torch.Tensor:
        """Run the layers, given hidden states on the first stage and the rotary angles of all patches.

        Subclasses arrange patches and features in the order of their family.
        """
        raise NotImplementedError

    def _layers(self, hidden_ph: torch.Tensor | None, angles: torch.Tensor, sequences: PackedSeqParams) -> torch.Tensor:
        hidden_p1h: torch.Tensor = self.decoder(
            hidden_states=None if hidden_ph is None else hidden_ph[:, None], attention_mask=None,
            rotary_pos_emb=angles[:, None, None], packed_seq_params=sequences)
        return hidden_p1h

    def _embed(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Embed patches: return the first layer's input `[patches, hidden]`."""
        hidden_ph = embed_patches(patches, [rows * columns for rows, columns in grids], self.conv1)[0]
        if self.position_embeddings is None:
            return hidden_ph
        # Interpolated once for each size: images of one size share the positions, and their gradient.
        table = self.position_embeddings.weight
        positions = {grid: block_order(interpolate_positions(table, grid, align_corners=True), grid, self.merge_size)
                     for grid in dict.fromkeys(grids)}
        return hidden_ph + torch.cat([positions[grid] for grid in grids])

    def _angles(self, grids: list[Grid]) -> torch.Tensor:
        """Return the rotary angles of all patches, float32 `[patches, channels of a head]`."""
        device = torch.cuda.current_device()
        by_grid = {grid: axial_angles(grid, self.merge_size, self.head_channels, self.rotary_base, device)
                   for grid in dict.fromkeys(grids)}
        return torch.cat([by_grid[grid] for grid in grids])


class Qwen25VisionTower(QwenVisionTower):
    """The tower of Qwen2.5-VL, whose layers are `WindowedLayer`.

    Between stages, patches are in the order of the windows.

    Args:
        window_side: blocks a side of a window.
        arguments: those of `QwenVisionTower`.
    """

    def __init__(self, *arguments: Any, window_side: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.window_side = window_side

    def _run(self, hidden_ph: torch.Tensor | None, angles: torch.Tensor, sequences: PackedSeqParams,
             grids: list[Grid]) -> torch.Tensor:
        windows = Windows.of(grids, self.merge_size, self.window_side)
        if hidden_ph is not None:
            hidden_ph = self._reordered(hidden_ph, windows.order)
        # Windows lie within their image, so the sequences of whole images keep their boundaries.
        hidden_p1h = self._layers(hidden_ph, self._reordered(angles, windows.order), WindowedSequences(
            **vars(sequences), windows=attention_params(windows.sequences)))
        if not self.post_process:
            return hidden_p1h
        blocks = hidden_p1h.view(-1, self.merge_size**2 * hidden_p1h.size(2))
        return blocks[windows.inverse][None]

    def _reordered(self, patches: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Reorder blocks of patches `[patches, ...]`."""
        return patches.view(-1, self.merge_size**2, *patches.shape[1:])[order].flatten(0, 1)


class Qwen3VisionTower(QwenVisionTower):
    """The tower of Qwen3-VL, whose features are those of the last layer, then those of each level (DeepStack).

    Between stages, the levels so far follow the hidden states.

    Args:
        num_levels: layers whose output becomes a level, on all stages (`mimo.model.deepstack.encoder_with_levels`).
        arguments: those of `QwenVisionTower`.
    """

    def __init__(self, *arguments: Any, num_levels: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.num_levels = num_levels

    def _run(self, hidden_ph: torch.Tensor | None, angles: torch.Tensor, sequences: PackedSeqParams,
             grids: list[Grid]) -> torch.Tensor:
        hidden_p1h = self._layers(hidden_ph, angles, sequences)
        if not self.post_process:
            return hidden_p1h
        by_patch = hidden_p1h.view(-1, self.merge_size**2, 1 + self.num_levels, self.config.hidden_size)
        return by_patch.transpose(1, 2).flatten(1)[None]
