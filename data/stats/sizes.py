"""Sizes of the model that data is looked at for, as flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """What the data depends on of the model that it is for."""

    seq_length: int = 2048
    """Tokens of a row, image tokens included. Longer samples are bad samples."""
    image_size: int = 336
    """Pixels a side that the encoder takes (the model's --vision-image-size). Not used with --image-tiling dynamic."""
    image_width: int = 0
    """Width of such an image where it is not square (--vision-image-width); 0: as its height."""
    max_image_size: int = 0
    """Most pixels a side of an image with --image-tiling dynamic (--vision-max-image-size); 0: any."""
    patch_size: int = 14
    """Pixels a side of a patch (--vision-patch-size)."""
    pixel_shuffle: int = 1
    """So many by so many patches become one token (--vision-pixel-shuffle). An image or tile of h x w pixels gives
    h/s * w/s image tokens, where s is patch size times pixel shuffle."""
    num_channels: int = 3
    """Channels of an image: 1 (grey) or 3 (--vision-num-channels)."""
    image_token_id: int = -1
    """Placeholder of an image. -1: the tokenizer's <image>, <|image_pad|>, ..., or else an id behind its vocabulary."""
    seed: int = 1234
    """Seed of the order of the samples, and of packing."""
