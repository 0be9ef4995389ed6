"""Image-text shards in WebDataset format, read through Megatron-Energon.

Each lane of a run is a fixed set of Energon workers, `num_workers` of them: global worker `lane * num_workers + w`, out
of `num_lanes * num_workers`. What a lane reads therefore does not depend on which rank reads it, nor on how many lanes
that rank serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from mimo.protocols import DataRequest, LaneReader

logger = logging.getLogger(__name__)


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
    append_eos: bool = False
    """Write the end-of-sequence token after each answer, for a chat template that ends none, such as LLaVA-1.5's."""
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
    """Bad samples that a run may pass over, over all ranks and restarts; one more ends it. Each is reported with shard
    and key."""


# Fields that no train sample depends on.
NOT_STREAMED = ("num_workers", "valid_data_path", "max_bad_samples")


def check(config: Config, request: DataRequest) -> None:
    """Raise ValueError, naming flags and values, for numbers that cannot work. Opens nothing."""
    for name, least in (("num_workers", 0), ("packing_buffer_size", 0), ("shuffle_buffer_size", 0),
                        ("max_samples_per_sequence", 1), ("max_bad_samples", 0), ("max_image_pixels", 1)):
        value = vars(config)[name]
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if config.packing_balance and not config.packing_buffer_size:
        raise ValueError("--packing-balance: chooses packs, and needs --packing-buffer-size")
    if config.packing_buffer_size and request.micro_batch_size != 1:
        raise ValueError(
            f"--packing-buffer-size {config.packing_buffer_size}: a packed row is a microbatch of its own; "
            f"--micro-batch-size {request.micro_batch_size} must be 1"
        )


def unpacked(config: Config) -> Config:
    """The flags for the validation split, whose samples are counted one by one."""
    return replace(config, packing_buffer_size=0, packing_balance=False)


class EnergonProvider:
    """The `energon` data set; see the module's text."""

    Config: ClassVar[type] = Config

    def validate(self, config: Any, request: DataRequest) -> None:
        """Raise ValueError, naming flags, for what cannot work: numbers, paths, splits, tokenizer, image tiling."""
        check(config, request)
        # Energon and torch take seconds to import, and --help needs neither.
        from data.energon_open import check_size, refuse_images, split_sizes
        from data.energon_vlm import ErrorLog, VlmTaskEncoder

        if request.split == "train":
            check_size(config, request.num_lanes)
        elif not sum(split_sizes(config, request.split)):
            path = config.valid_data_path or config.data_path
            raise ValueError(f"--valid-data-path {path}: has no sample to validate on")
        VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        if request.tokens.image_token_id < 0:
            refuse_images(config, request.split)

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> LaneReader:
        """Open some lanes. Raises ValueError as `validate` does."""
        check(config, request)
        from data.energon_reader import Encoding, EnergonReader
        from data.energon_valid import ValidReader
        from data.energon_vlm import ErrorLog, VlmTaskEncoder, to_sample

        train = request.split == "train"
        config = config if train else unpacked(config)
        errors = ErrorLog(config.max_bad_samples)
        encoder = VlmTaskEncoder(config, request, errors)
        if train and 0 in lanes and encoder.tokenizer.rewrites_history:
            logger.warning("%s: the chat template writes an answer differently once other turns follow; of a "
                           "conversation with several answers, those that it has rewritten are not learned",
                           encoder.tokenizer.name)
        encoding = Encoding(encoder, errors.handler, to_sample)
        return EnergonReader(config, request, lanes, encoding) if train else ValidReader(
            config, request, lanes, encoding)

    def num_samples(self, config: Any, split: str) -> int | None:
        """Samples in one pass over a split; training starts over without end, and packs as it goes."""
        if split == "train":
            return None
        from data.energon_open import split_sizes

        return sum(split_sizes(config, split))

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """Fields that decide the samples; of --num-workers the product with the lanes counts, which readers check."""
        from data.digests import TOKENIZER_FILES, content_of_data, content_of_folder

        return {name: value for name, value in vars(config).items() if name not in NOT_STREAMED} | {
            "data_path": content_of_data(config.data_path),
            "tokenizer": content_of_folder(config.tokenizer, TOKENIZER_FILES)}

    def max_bad_samples(self, config: Any) -> int:
        """`--max-bad-samples`."""
        limit: int = config.max_bad_samples
        return limit

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Token ids up to the end of the sequence as text."""
        from data.prompts import load_tokenizer

        tokenizer = load_tokenizer(config.tokenizer)
        end = tokenizer.eos_token_id
        return str(tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens, skip_special_tokens=True))


provider = EnergonProvider()
