"""Encoders that take an image as tiles and join their tokens, as LLaVA-NeXT does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import sharded_state_dict_default

from mimo.model.submodule import Projector, VisionSubmodule
from mimo.visual import Tiles


class TiledProjector(Projector):
    """The projector of LLaVA with a learned token that ends each row of an image's tokens (`image_newline`).

    The token is a parameter of the projector, so that it is frozen with it and has its learning rate.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.image_newline = torch.nn.Embedding(1, self.config.hidden_size, dtype=self.config.params_dtype,
                                                device=torch.cuda.current_device())
        # transformers and LLaVA draw it with a deviation of hidden ** -0.5.
        torch.nn.init.normal_(self.image_newline.weight, std=self.config.hidden_size**-0.5)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (),
                           metadata: dict[str, Any] | None = None) -> ShardedStateDict:
        """Return the projector's state. Every tensor-parallel rank has the same token, and one saves it."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | sharded_state_dict_default(self.image_newline, f"{prefix}image_newline.", sharded_offsets,
                                                  metadata, tp_group=self.tp_group)


class TiledVision(VisionSubmodule):
    """A `VisionSubmodule` whose images are cut into tiles. Its output has the tokens of each image joined.

    Attributes:
        tiles: how images are cut.
    """

    def __init__(self, *args: Any, tiles: Tiles, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tiles = tiles

    def run_encoder(self, encoder_inputs: dict[str, Any] | None,
                    hidden_states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run the encoder's layers over all tiles; see `VisionSubmodule.run_encoder`."""
        of_tiles = {name: value for name, value in (encoder_inputs or {}).items() if name == "pixel_values"}
        return super().run_encoder(of_tiles, hidden_states)

    def project(self, features: torch.Tensor, encoder_inputs: dict[str, Any] | None) -> torch.Tensor:
        """Project the tokens of all tiles, and join those of each image in the order of `Tiles.token_order`."""
        assert encoder_inputs is not None, "tiles come with the sizes of their images"
        projected = super().project(features, encoder_inputs)
        newline = self.input_projections[0].image_newline.weight
        rows, first = [], 0
        for height, width in encoder_inputs["imgs_sizes"].tolist():
            order = self.tiles.token_order(height, width)
            rows.append(np.where(order < 0, len(projected), first + order))
            first += self.tiles.count(height, width) * self.tiles.num_tokens
        assert first == len(projected), (first, projected.shape)
        places = torch.from_numpy(np.concatenate(rows))
        # A copy from memory that is not page-locked could make the host wait for the device.
        places = (places.pin_memory() if projected.is_cuda else places).to(projected.device, non_blocking=True)
        return torch.cat([projected, newline.to(projected.dtype)]).index_select(0, places)
