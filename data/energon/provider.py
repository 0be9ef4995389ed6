"""Image-text shards in WebDataset format, read through Megatron-Energon.

Each lane of a run is a fixed set of Energon workers, `num_workers` of them: global worker `lane * num_workers + w`, out
of `num_lanes * num_workers`. What a lane reads therefore does not depend on which rank reads it, nor on how many lanes
that rank serves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mimo.config.toml_file import flag_name
from mimo.protocols import DataRequest, ImageProcessing, LaneReader, Question, TokenSpec, VideoProcessing
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from data.image_tiling import Tiling

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Data set `energon`: WebDataset shards prepared for Megatron-Energon."""

    data_path: str = ""
    """Folder prepared with `energon prepare`, or a metadataset YAML that blends several."""
    valid_data_path: str = ""
    """Held-out samples. Default: the `val` split of --data-path."""
    tokenizer: str = ""
    """Folder, or id on the hub, of a Hugging Face tokenizer. Default: that of --load-hf, --load-language-from or
    --hf-config, if it has one."""
    prompt_format: str = "tokenizer"
    """How the turns of a conversation are written: `tokenizer` (its own chat template) or a format name, such as chatml
    or llama3."""
    image_tag_type: str = "none"
    """Tags around each image: none, internvl (<img> </img>), nvlm (<Image> </Image>), ..."""
    append_eos: bool = False
    """Write the end-of-sequence token after each answer. For chat templates that do not end answers, such as
    LLaVA-1.5's."""
    num_workers: int = 1
    """Energon worker processes of each lane; 0 reads in the training process, in the same order as 1."""
    packing_buffer_size: int = 0
    """Number of samples from which each worker chooses those of a packed row; 0: one sample in each row."""
    packing_balance: bool = False
    """Choose packed rows with about equal numbers of image tokens (of tiles, if the model takes tiles), so that all
    lanes have about the same encoder work."""
    shuffle_buffer_size: int = 0
    """Size of each worker's shuffle buffer, in samples, in addition to shuffled shards; 0: none."""
    max_samples_per_sequence: int = 100
    """Largest number of consecutive samples that are read from a shard."""
    shuffle: bool = True
    """Shuffle train shards and samples. --no-shuffle reads them in stored order."""
    image_tiling: Literal["auto", "stretch", "crop", "pad", "fixed", "anyres", "dynamic", "smart_resize",
                          "resize"] = "auto"
    """How an image becomes what the encoder takes. stretch: resized to the encoder's size. crop: the shorter side
    resized to it, then the centre cut out. pad: made square with borders in the mean colour, then resized. fixed:
    cut into tiles of that size. anyres: the whole image, then tiles of it, as LLaVA-NeXT. dynamic: its own size and
    aspect ratio, in patches. smart_resize: likewise, with the sizes of Qwen-VL. auto: as the model's Hugging Face
    processor does (preprocessor_config.json beside --hf-config, --load-hf or --load-vision-from, or else that of
    the family: CLIP crops, SigLIP stretches, Nemotron is dynamic, Qwen-VL resizes smartly). resize: the earlier
    name of stretch."""
    image_resample: Literal["auto", "bicubic", "bilinear"] = "auto"
    """Kernel that images are resized with; auto: as the model's processor."""
    max_tiles: int | None = None
    """Largest number of tiles of an image with --image-tiling fixed, not counting the thumbnail. Default: as the
    model's processor, or else 6."""
    use_thumbnail: bool = False
    """With --image-tiling fixed, add the whole image as a last tile if there are several tiles."""
    image_grid_pinpoints: tuple[str, ...] = ()
    """HEIGHTxWIDTH in pixels of each grid of tiles that --image-tiling anyres may cut an image into, such as 336x672.
    Default: those of LLaVA-NeXT, which are 1x2, 2x1, 2x2, 3x1 and 1x3 tiles."""
    min_patches: int | None = None
    """Smallest number of patches of an image with --image-tiling dynamic or smart_resize; smaller images are enlarged.
    Default: as the model's files say, or else 4 (dynamic) or the family's own value (smart_resize)."""
    max_patches: int | None = None
    """Largest number of patches of an image with --image-tiling dynamic or smart_resize; larger images are reduced.
    Default: as the model's files say, or else 1024 (dynamic) or the family's own value (smart_resize)."""
    min_side: int = 0
    """With --image-tiling dynamic, enlarge images whose shorter side would have fewer pixels, as far as --max-patches
    allows (Megatron's --dynamic-resolution-min-side). 0: off, as in inference engines."""
    max_image_pixels: int = 100_000_000
    """Largest number of pixels of an image, also after cropping or padding. An image with more is a bad sample and is
    not decoded."""
    image_mean: tuple[float, ...] = ()
    """Mean of each channel, of pixels in 0..1; one value serves all channels. Default: as the model's processor."""
    image_std: tuple[float, ...] = ()
    """Standard deviation of each channel, of pixels in 0..1; one value serves all channels. Default: as the model's
    processor."""
    video_processing: Literal["auto", "qwen2_5_vl", "qwen3_vl"] = "auto"
    """Model family whose rules choose frames and their size. qwen2_5_vl: frames at a rate from the first one on, limits
    for each frame. qwen3_vl: frames spread over the whole video, limits for all of them together. auto: as the model's
    video processor (video_preprocessor_config.json, else preprocessor_config.json, in the folders of --image-tiling
    auto), or else that of the family. Values of video flags that are not given come from there. Only the family of the
    model works."""
    video_fps: float | None = None
    """Frames to sample from each second of a video; 0: all frames."""
    video_num_frames: int | None = None
    """Frames to sample from each video, in place of --video-fps; 0: as --video-fps says."""
    video_min_frames: int | None = None
    """Smallest number of frames that --video-fps samples, if the video has as many."""
    video_max_frames: int | None = None
    """Largest number of frames that --video-fps samples."""
    video_min_pixels: int | None = None
    """Smallest number of pixels of a frame (qwen2_5_vl) or of all frames of a video (qwen3_vl); smaller ones are
    enlarged."""
    video_max_pixels: int | None = None
    """Largest number of pixels of a frame (qwen2_5_vl) or of all frames of a video (qwen3_vl); larger ones are
    reduced."""
    video_max_tokens: int | None = None
    """Further limit of pixels; 0: none. qwen2_5_vl: the context length, of which a video may take nine tenths.
    qwen3_vl: the largest number of tokens of a frame. It is max_video_tokens of a processor with
    cap_pixels_per_frame."""
    video_resample: Literal["auto", "bicubic", "bilinear"] = "auto"
    """Kernel that frames are resized with."""
    video_mean: tuple[float, ...] = ()
    """Mean of each channel of videos, of pixels in 0..1."""
    video_std: tuple[float, ...] = ()
    """Standard deviation of each channel of videos, of pixels in 0..1."""
    max_bad_samples: int = 100
    """Number of bad samples that a run may skip, over all ranks and restarts. One more ends it. Each is reported with
    shard and key."""


# Fields that no train sample depends on.
NOT_STREAMED = ("num_workers", "valid_data_path", "max_bad_samples")
# Fields of `VideoProcessing` that are flags, beside `rule`, and values of the flags that leave them to the model.
VIDEO_FIELDS = ("fps", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "max_tokens", "resample",
                "mean", "std")
OPEN = (None, "auto", ())


def streamed_flags(config: Config) -> dict[str, Any]:
    """Return the flags that train samples depend on. Those of videos are left out for a model that takes none."""
    return {name: value for name, value in vars(config).items() if name not in NOT_STREAMED
            and not (name.startswith("video_") and config.video_processing == "auto")}


def path_of(config: Config, split: str) -> tuple[str, str]:
    """Return the flag and the path of a split, `train` or `valid`."""
    if split == "valid" and config.valid_data_path:
        return "--valid-data-path", config.valid_data_path
    return "--data-path", config.data_path


def check_path(config: Config, split: str) -> None:
    """Raise ValueError unless the path of a split is given and, unless it is a URL, exists."""
    flag, path = path_of(config, split)
    if not path:
        raise ValueError(f"{flag}: name the folder, file or YAML of the data set")
    if "://" not in path and not os.path.exists(path):
        raise ValueError(f"{flag} {path}: does not exist")


def check(config: Config, request: DataRequest) -> None:
    """Raise ValueError, with flags and values, for numbers that cannot work. Reads no file."""
    for name, least in (("num_workers", 0), ("packing_buffer_size", 0), ("shuffle_buffer_size", 0),
                        ("max_samples_per_sequence", 1), ("max_bad_samples", 0), ("max_image_pixels", 1)):
        value = vars(config)[name]
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if config.packing_balance and not config.packing_buffer_size:
        raise ValueError("--packing-balance: it chooses packs, so it needs --packing-buffer-size")
    if config.packing_buffer_size and request.micro_batch_size != 1:
        raise ValueError(
            f"--packing-buffer-size {config.packing_buffer_size}: a packed row is a microbatch of its own; "
            f"--micro-batch-size {request.micro_batch_size} must be 1"
        )


def with_image_flags(config: Config, find: Callable[[], Sequence[ImageProcessing]]) -> Config:
    """Return the flags with the image settings filled in that they leave to the model.

    Args:
        config: the flags.
        find: returns the processing of each of the model's folders; called only if the flags leave something open.

    Raises:
        ValueError: nothing was found, two folders disagree, or `find` raised it.
    """
    if config.image_tiling == "resize":
        config = replace(config, image_tiling="stretch")
    if not _open_flags(config):
        return config
    found = find()
    if not found:
        raise ValueError(f"{', '.join(_open_flags(config))}: the model provider does not say how its images become "
                         "pixels (image_processing); give these flags")
    filled = [_filled(config, processing) for processing in found]
    check_agreement("image", found, filled)
    return filled[0]


def check_agreement(kind: str, found: Sequence[ImageProcessing | VideoProcessing], filled: Sequence[Config]) -> None:
    """Raise ValueError, with flags and values, if processors of one kind, `found`, fill in the flags differently."""
    first = filled[0]
    for other, processing in zip(filled[1:], found[1:], strict=True):
        names = [name for name, value in vars(first).items() if vars(other)[name] != value]
        if names:
            values = [" ".join(f"{flag_name(name)} {_shown(vars(each)[name])}" for name in names)
                      for each in (first, other)]
            raise ValueError(f"two {kind} processors disagree: {found[0].source} has {values[0]}, {processing.source} "
                             f"has {values[1]}; give {' and '.join(map(flag_name, names))}")


def _open_flags(config: Config) -> list[str]:
    """Return the flags whose values come from the model's image processor."""
    tiling = config.image_tiling
    any_size = tiling in ("dynamic", "smart_resize")
    is_open = {
        "image_tiling": tiling == "auto",
        "image_resample": config.image_resample == "auto",
        "image_mean": not config.image_mean,
        "image_std": not config.image_std,
        "min_patches": any_size and config.min_patches is None,
        "max_patches": any_size and config.max_patches is None,
        "max_tiles": tiling == "fixed" and config.max_tiles is None,
    }
    return [flag_name(name) for name, value in is_open.items() if value]


def _filled(config: Config, processing: ImageProcessing) -> Config:
    """Return the flags with the open ones filled in from one processor."""
    if config.image_tiling == "auto":
        config = replace(config, image_tiling=processing.tiling)
        if processing.tiling == "fixed":
            config = replace(config, use_thumbnail=config.use_thumbnail or processing.use_thumbnail)
    if config.image_resample == "auto":
        config = replace(config, image_resample=processing.resample)
    if config.image_tiling in ("dynamic", "smart_resize"):
        if config.max_patches is None and processing.max_patches < 0:
            raise ValueError(f"{processing.source} sets no limit to the patches of an image: give --max-patches")
        config = replace(
            config, min_patches=config.min_patches if config.min_patches is not None else processing.min_patches or 4,
            max_patches=config.max_patches if config.max_patches is not None else processing.max_patches or 1024)
    if config.image_tiling == "fixed" and config.max_tiles is None:
        config = replace(config, max_tiles=processing.max_tiles or 6)
    return replace(config, image_mean=config.image_mean or processing.mean,
                   image_std=config.image_std or processing.std)


def with_video_flags(config: Config, find: Callable[[], Sequence[VideoProcessing]]) -> Config:
    """Return the flags with the video settings filled in that they leave to the model.

    Args:
        config: the flags.
        find: returns the processing of each of the model's folders; empty for a model that takes no videos.

    Raises:
        ValueError: the model takes no videos and there are such flags, two folders disagree, or `find` raised it.
    """
    given = {name: value for name, value in vars(config).items() if name.startswith("video_") and value not in OPEN}
    if len(given) == len(VIDEO_FIELDS) + 1:
        return config
    try:
        found = find()
    except ValueError:
        if given:
            raise
        return config  # a data set of images alone needs no video processor; a video is refused by name
    if not found:
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{flag_name(name)} {value}: the model takes no videos; --model-provider qwen2_5_vl and "
                             "qwen3_vl do")
        return config
    filled = [_filled_from_video(config, processing) for processing in found]
    if not given and any(other != filled[0] for other in filled):
        return config  # a data set of images alone does not need one answer either
    check_agreement("video", found, filled)
    return filled[0]


def _filled_from_video(config: Config, processing: VideoProcessing) -> Config:
    """Return the flags with the open ones filled in from one processor."""
    values: dict[str, Any] = {f"video_{name}": getattr(processing, name) for name in VIDEO_FIELDS}
    if config.video_num_frames and config.video_fps is None:
        values["video_fps"] = 0.0
    elif config.video_fps is not None and config.video_num_frames is None:
        values["video_num_frames"] = 0
    rule = processing.rule if config.video_processing == "auto" else config.video_processing
    return replace(config, video_processing=rule, **{name: value for name, value in values.items()
                                                     if vars(config)[name] in OPEN})


def video_processing_of(config: Config, tokens: TokenSpec) -> VideoProcessing | None:
    """Return how videos become pixels; None if the model takes none, or nothing was filled in from it.

    Raises:
        ValueError: the flags cannot work; the message names them and their values.
    """
    rule = config.video_processing
    if tokens.video_token_id < 0 or tokens.image_token_id < 0 or rule == "auto":
        return None
    if (rule == "qwen3_vl") != bool(tokens.placeholder_frames):
        raise ValueError(f"--video-processing {rule}: the model has the placeholders of the other family; leave it out")
    values = {name: vars(config)[f"video_{name}"] for name in VIDEO_FIELDS}
    for name, value in values.items():
        if value in OPEN:
            raise ValueError(f"{flag_name(f'video_{name}')} {value}: not filled in from the model")
    _check_video(values, tokens.num_channels)
    return VideoProcessing(rule=rule, temporal_patch_size=tokens.temporal_patch_size, timestamps=rule == "qwen3_vl",
                           source="the flags of the data", **values)


def shared_normalisation(images: Tiling | None, videos: VideoProcessing | None) -> Normalisation | None:
    """Return the normalisation of images and videos; None if they have different ones, or there are no images.

    A microbatch has one, so with two of them each image is normalised where it is decoded.
    """
    if images is None:
        return None
    found = Normalisation(images.mean, images.std)
    return found if videos is None or Normalisation(videos.mean, videos.std) == found else None


def _check_video(values: Mapping[str, Any], num_channels: int) -> None:
    for name in ("fps", "num_frames", "max_tokens"):
        if values[name] < 0:
            raise ValueError(f"{flag_name(f'video_{name}')} {values[name]}: must not be negative")
    if values["fps"] and values["num_frames"]:
        raise ValueError(f"--video-fps {values['fps']} --video-num-frames {values['num_frames']}: give one of them")
    for unit in ("frames", "pixels"):
        least, most = values[f"min_{unit}"], values[f"max_{unit}"]
        if not 1 <= least <= most:
            raise ValueError(f"--video-min-{unit} {least} --video-max-{unit} {most}: need 1 <= min <= max")
    for name in ("mean", "std"):
        if len(values[name]) != num_channels:
            raise ValueError(f"{flag_name(f'video_{name}')} {' '.join(map(str, values[name]))}: the encoder takes "
                             f"{num_channels} channels")
    if min(values["std"]) <= 0:
        raise ValueError(f"--video-std {' '.join(map(str, values['std']))}: must be positive")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def tokenizer_digest(config: Config) -> str:
    from data.digests import TOKENIZER_FILES, content_of_folder

    return content_of_folder(config.tokenizer, TOKENIZER_FILES)


def unpacked(config: Config) -> Config:
    """Return the flags for the validation split, whose samples are counted one by one."""
    return replace(config, packing_buffer_size=0, packing_balance=False)


class EnergonProvider:
    """The `energon` data set; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Any, request: DataRequest) -> None:
        """Raise ValueError, with the flags, if numbers, paths, splits, the tokenizer or image tiling cannot work."""
        check(config, request)
        check_path(config, request.split)
        # Energon and torch take seconds to import, and --help needs neither of them.
        from data.energon.open import check_size, refuse_images, split_sizes
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder

        if request.split == "train":
            check_size(config, request.num_lanes)
        elif not sum(split_sizes(config, request.split)):
            path = config.valid_data_path or config.data_path
            raise ValueError(f"--valid-data-path {path}: has no sample to validate on")
        VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        if request.tokens.image_token_id < 0:
            refuse_images(config, request.split)

    def with_tokenizer(self, config: Config, folders: Sequence[str]) -> Config:
        """Return the flags with the first folder that has a tokenizer, unless they name one."""
        found = (folder for folder in folders if os.path.isfile(os.path.join(folder, "tokenizer_config.json")))
        return config if config.tokenizer else replace(config, tokenizer=next(found, ""))

    def with_image_processing(self, config: Config, find: Callable[[], Sequence[ImageProcessing]]) -> Config:
        """Return the flags with the model's values filled in; see `with_image_flags`."""
        return with_image_flags(config, find)

    def with_video_processing(self, config: Config, find: Callable[[], Sequence[VideoProcessing]]) -> Config:
        """Return the flags with the model's video processing filled in; see `with_video_flags`."""
        return with_video_flags(config, find)

    def video_processing(self, config: Config, tokens: TokenSpec) -> VideoProcessing | None:
        """Return how videos become pixels under flags that are filled in; None if the model takes none."""
        return video_processing_of(config, tokens)

    def image_processing(self, config: Config, tokens: TokenSpec) -> ImageProcessing:
        """Return how images become pixels under flags that are filled in."""
        tiling, resample = config.image_tiling, config.image_resample
        assert tiling not in ("auto", "resize") and resample != "auto", config
        return ImageProcessing(
            tiling, config.image_mean, config.image_std, resample, min_patches=config.min_patches or 0,
            max_patches=config.max_patches or 0, min_side=config.min_side, max_tiles=config.max_tiles or 0,
            use_thumbnail=config.use_thumbnail, source="the flags of the data")

    def normalisation(self, config: Config, tokens: TokenSpec) -> Normalisation | None:
        """Return how the encoder's rank normalises 8-bit images under flags that are filled in; None for floats."""
        from data.image_tiling import tiling_of

        images = tiling_of(config, tokens) if tokens.image_token_id >= 0 else None
        return shared_normalisation(images, video_processing_of(config, tokens))

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> LaneReader:
        check(config, request)
        from data.energon.reader import Encoding, EnergonReader
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder, to_sample
        from data.energon.validation import ValidReader

        train = request.split == "train"
        config = config if train else unpacked(config)
        errors = ErrorLog(config.max_bad_samples)
        encoder = VlmTaskEncoder(config, request, errors)
        if train and 0 in lanes and encoder.tokenizer.rewrites_history:
            logger.warning("%s: the chat template writes an answer differently once other turns follow. In a "
                           "conversation with several answers, the rewritten ones are not learned",
                           encoder.tokenizer.name)
        encoding = Encoding(encoder, errors.handler, to_sample)
        return EnergonReader(config, request, lanes, encoding) if train else ValidReader(
            config, request, lanes, encoding)

    def question(self, config: Any, request: DataRequest, text: str, images: Sequence[tuple[str, bytes]], *,
                 thinks: bool) -> Question:
        """Return a question as samples are written; see `mimo.protocols.QuestionDataProvider`."""
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder
        from data.prompts import IMAGE_MARKER

        content: Any = text
        if IMAGE_MARKER not in text:
            content = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
        encoder = VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        messages = [{"role": "user", "content": content}]
        found = encoder.question(messages, images, thinks=thinks)
        plain = encoder.question(messages, images, pixels=False) if thinks else None
        if plain is not None and plain.sample.tokens.tolist() == found.sample.tokens.tolist():
            raise ValueError(f"--think: {encoder.tokenizer.name} writes the same before every answer, so that the "
                             "model itself begins its thoughts or has none; leave it out")
        return found

    def num_samples(self, config: Any, split: str) -> int | None:
        """Return the samples in one pass over a validation split. Training repeats its split without end."""
        if split == "train":
            return None
        from data.energon.open import split_sizes

        return sum(split_sizes(config, split))

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """Return the fields that decide the samples, but not --num-workers: readers check its product with lanes."""
        from data.digests import content_of_data

        return streamed_flags(config) | {
            "data_path": content_of_data(config.data_path), "tokenizer": tokenizer_digest(config)}

    def max_bad_samples(self, config: Any) -> int:
        limit: int = config.max_bad_samples
        return limit

    def decode(self, config: Any, tokens: list[int]) -> str:
        from data.hf_tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config.tokenizer)
        end = tokenizer.eos_token_id
        return str(tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens, skip_special_tokens=True))


provider = EnergonProvider()
