"""Image-text shards in WebDataset format, read through Megatron-Energon.

Each lane of a run is a fixed set of Energon workers, `num_workers` of them: global worker `lane * num_workers + w`, out
of `num_lanes * num_workers`. What a lane reads therefore does not depend on which rank reads it, nor on how many lanes
that rank serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Config:
    """Data set `energon`: WebDataset shards prepared for Megatron-Energon."""

    data_path: str = ""
    """Folder prepared with `energon prepare`, or a metadataset YAML that blends several."""
    valid_data_path: str = ""
    """Where held-out samples are; empty: the `val` split of --data-path."""
    tokenizer: str = ""
    """Folder of a Hugging Face tokenizer."""
    prompt_format: str = "tokenizer"
    """How turns are written: `tokenizer` (its own chat template) or a name, such as chatml or llama3."""
    image_tag_type: str = "none"
    """What stands around each image: none, internvl (<img> </img>), nvlm (<Image> </Image>), ..."""
    num_workers: int = 1
    """Energon worker processes of each lane; 0 reads in the training process, in the order of 1."""
    packing_buffer_size: int = 0
    """Samples among which each worker chooses those of a pack; 0: one sample a row."""
    packing_balance: bool = False
    """Choose packs whose image tokens are about equal, so that no lane's encoder work stands out."""
    shuffle_buffer_size: int = 0
    """Samples of a worker that are shuffled with each other, on top of the shuffled shards; 0: none."""
    max_samples_per_sequence: int = 100
    """Most samples that are read from a shard one after the other."""
    shuffle: bool = True
    """Shuffle train shards and samples; --no-shuffle reads them in the order in which they lie."""
    image_tiling: Literal["resize", "fixed", "dynamic"] = "resize"
    """resize: each image to the encoder's size. fixed: tiles of that size. dynamic: native aspect ratio."""
    max_tiles: int = 6
    """Most tiles of an image with --image-tiling fixed, without the thumbnail."""
    use_thumbnail: bool = False
    """With --image-tiling fixed, the whole image too, as a last tile, where there are several."""
    min_patches: int = 4
    """Fewest patches of an image with --image-tiling dynamic; smaller images are enlarged."""
    max_patches: int = 1024
    """Most patches of an image with --image-tiling dynamic; larger images are reduced."""
    max_image_pixels: int = 100_000_000
    """An image with more pixels is a bad sample: it is not decoded."""
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Mean of each channel, of pixels in 0..1 (CLIP's); one value serves all channels."""
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation of each channel, of pixels in 0..1 (CLIP's); one value serves all channels."""
    max_bad_samples: int = 100
    """Bad samples that a run may pass over; one more ends it. Each is reported with shard and key."""
