"""A CLIP- or SigLIP-style vision transformer on its own process groups."""

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
from mimo.model.attention import packed_seq_params as attention_params
from mimo.model.radio import (
    Grid,
    check_images,
    embed_patches,
    packed_pixel_shuffle,
    packed_positions,
    patch_grids,
    pixel_shuffle,
)


class ViT(MegatronModule):
    """Encoder of images to patch features, for images of one size or packed images of any size.

    Patch embedding, class token, positions and norms are replicated over tensor-parallel ranks, because they draw from
    the default random stream, which those ranks share. Attribute names are those of Megatron Core's `CLIPViTModel`,
    which has neither pipeline stages nor a variable last norm.

    Args:
        config: transformer sizes; `num_layers` counts the layers of all pipeline stages.
        layer_spec: this stage's layers.
        norm: norm class for the norms outside the layers, called as `norm(config=, hidden_size=, eps=)`.
        image_size: pixels a side of the (square) images; with dynamic resolution, of the image for which there is one
            position embedding for each patch.
        patch_size: pixels a side of a patch. Pixels at the right and at the bottom that fill no patch are left out.
        num_channels: image channels.
        patch_bias: whether the patch embedding has a bias (SigLIP).
        class_token: whether a learned token goes before the patches; it is dropped from the output (CLIP).
        pre_layernorm: whether there is a norm between embedding and layers (CLIP's `pre_layrnorm`).
        final_layernorm: whether there is a norm after the last layer.
        pg_collection: the module's process groups.
        pre_process: whether this rank holds the first pipeline stage.
        post_process: whether this rank holds the last pipeline stage.
        dynamic_resolution: whether images have any size and are packed; there is no class token then.
        pixel_shuffle: patches a side that become one token of the output.
    """

    def __init__(self, config: TransformerConfig, layer_spec: TransformerBlockSubmodules, norm: Any, *, image_size: int,
                 patch_size: int, num_channels: int, patch_bias: bool, class_token: bool, pre_layernorm: bool,
                 final_layernorm: bool, pg_collection: ProcessGroupCollection, pre_process: bool = True,
                 post_process: bool = True, dynamic_resolution: bool = False, pixel_shuffle: int = 1) -> None:
        super().__init__(config)
        side = image_size // patch_size
        assert side, f"image size {image_size}, patch size {patch_size}"
        assert not (dynamic_resolution and class_token), "packed images have no class token"
        assert dynamic_resolution or side % pixel_shuffle == 0, f"{side} patches a side, pixel shuffle {pixel_shuffle}"
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = pre_process
        self.post_process = post_process
        self.image_shape = (num_channels, image_size, image_size)
        self.patch_size, self.grid = patch_size, (side, side)
        self.dynamic_resolution, self.pixel_shuffle = dynamic_resolution, pixel_shuffle
        self.num_patches = side**2
        self.num_class_tokens = int(class_token)
        if pre_process:
            self._build_embedding(patch_size, num_channels, patch_bias)
            self.ln_pre = self._build_norm(norm) if pre_layernorm else None
        self.decoder = TransformerBlock(config, layer_spec, post_layer_norm=False, pre_process=pre_process,
                                        post_process=post_process, pg_collection=pg_collection)
        self.ln_post = self._build_norm(norm) if post_process and final_layernorm else None

    @property
    def seq_length(self) -> int:
        """Tokens of an image inside the encoder, patches and class token; 0 if it depends on the image."""
        return 0 if self.dynamic_resolution else self.num_patches + self.num_class_tokens

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Set the input of a later pipeline stage, which is the output of the one before; None on the first stage."""
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, pixel_values: torch.Tensor | None = None, imgs_sizes: np.ndarray | None = None,
                packed_seq_params: PackedSequences | None = None) -> torch.Tensor:
        """Run this pipeline stage.

        Args:
            pixel_values: normalized pixels `[images, channels, image_size, image_size]`, any float dtype; with dynamic
                resolution patches `[1, patches, channels * patch_size ** 2]`, image after image and row by row. Read on
                the first stage only.
            imgs_sizes: with dynamic resolution int64 `[images, 2]`, height and width in pixels, on the host.
            packed_seq_params: with dynamic resolution one sequence of patches for each image.

        Returns:
            On the last stage `[images, tokens, pixel_shuffle ** 2 * hidden]`, packed `[1, tokens of all images, ...]`;
            on the others `[seq_length, images, hidden]`, packed `[patches, 1, hidden]`. The dtype is that of the
            parameters.

        Raises:
            ValueError: the images do not have the size that the encoder was built for, or the number of patches does
                not fit `imgs_sizes`.
        """
        grids: list[Grid] = []
        if self.dynamic_resolution:
            assert imgs_sizes is not None and packed_seq_params is not None, "images of any size come with their sizes"
            assert len(packed_seq_params.cu_seqlens) == len(imgs_sizes) + 1, "one sequence for each image"
            if self.pre_process or (self.post_process and self.pixel_shuffle > 1):
                grids = patch_grids(imgs_sizes, self.patch_size)
        hidden_snh = None
        if self.pre_process:
            assert pixel_values is not None, "the first pipeline stage of a ViT needs pixel_values"
            hidden_snh = (self._embed_packed(pixel_values, grids) if self.dynamic_resolution
                          else self._embed(pixel_values))
        hidden_snh = self.decoder(hidden_states=hidden_snh, attention_mask=None,
                                  packed_seq_params=attention_params(packed_seq_params))
        if not self.post_process:
            return hidden_snh
        if self.ln_post is not None:
            hidden_snh = self.ln_post(hidden_snh)
        hidden_nsh = hidden_snh[self.num_class_tokens:].transpose(0, 1).contiguous()
        if grids and self.pixel_shuffle > 1:
            return packed_pixel_shuffle(hidden_nsh[0], grids, self.pixel_shuffle)[None]
        return pixel_shuffle(hidden_nsh, self.grid, self.pixel_shuffle)

    def _build_embedding(self, patch_size: int, num_channels: int, patch_bias: bool) -> None:
        hidden, dtype, device = self.config.hidden_size, self.config.params_dtype, torch.cuda.current_device()
        self.conv1 = torch.nn.Conv2d(num_channels, hidden, kernel_size=patch_size, stride=patch_size, bias=patch_bias,
                                     dtype=dtype, device=device)
        self.position_embeddings = torch.nn.Embedding(self.num_patches + self.num_class_tokens, hidden, dtype=dtype,
                                                      device=device)
        drawn = [self.conv1.weight, self.position_embeddings.weight]
        if self.num_class_tokens:
            self.class_token = torch.nn.Parameter(torch.empty(1, 1, hidden, dtype=dtype, device=device))
            drawn.append(self.class_token)
        for parameter in drawn:
            self.config.init_method(parameter)
        if self.conv1.bias is not None:
            torch.nn.init.zeros_(self.conv1.bias)

    def _build_norm(self, norm: Any) -> Any:
        return norm(config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon)

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed images: return the first layer's input `[seq_length, images, hidden]`."""
        check_images(pixel_values, self.image_shape)
        patches_nhyx = self.conv1(pixel_values.to(self.conv1.weight.dtype))
        hidden_nsh = patches_nhyx.flatten(2).transpose(1, 2)
        if self.num_class_tokens:
            hidden_nsh = torch.cat([self.class_token.expand(len(hidden_nsh), -1, -1), hidden_nsh], dim=1)
        hidden_nsh = hidden_nsh + self.position_embeddings.weight
        if self.ln_pre is not None:
            hidden_nsh = self.ln_pre(hidden_nsh)
        return hidden_nsh.transpose(0, 1).contiguous()

    def _embed_packed(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Embed packed patches: return the first layer's input `[patches, 1, hidden]`."""
        hidden_nsh = embed_patches(patches, [rows * columns for rows, columns in grids], self.conv1)
        hidden_nsh = hidden_nsh + packed_positions(self.position_embeddings.weight, grids)
        if self.ln_pre is not None:
            hidden_nsh = self.ln_pre(hidden_nsh)
        return hidden_nsh.transpose(0, 1).contiguous()
