"""The video flags of the data set, of which those left out come from the model's video processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data.energon.provider import Config, check_agreement
from mimo.config.toml_file import flag_name
from mimo.protocols import TokenSpec, VideoProcessing
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from data.image_tiling import Tiling

# Fields of `VideoProcessing` that are flags, beside `rule`, and values of the flags that leave them to the model.
FIELDS = ("fps", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "max_tokens", "resample", "mean",
          "std")
OPEN = (None, "auto", ())


def with_video_flags(config: Config, find: Callable[[], Sequence[VideoProcessing]]) -> Config:
    """Return the flags with the video settings filled in that they leave to the model.

    Args:
        config: the flags.
        find: returns the processing of each of the model's folders; empty for a model that takes no videos.

    Raises:
        ValueError: the model takes no videos and there are such flags, two folders disagree, or `find` raised it.
    """
    given = {name: value for name, value in vars(config).items() if name.startswith("video_") and value not in OPEN}
    if len(given) == len(FIELDS) + 1:
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
    filled = [_filled(config, processing) for processing in found]
    if not given and any(other != filled[0] for other in filled):
        return config  # a data set of images alone does not need one answer either
    check_agreement("video", found, filled)
    return filled[0]


def _filled(config: Config, processing: VideoProcessing) -> Config:
    """Return the flags with the open ones filled in from one processor."""
    values: dict[str, Any] = {f"video_{name}": getattr(processing, name) for name in FIELDS}
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
    values = {name: vars(config)[f"video_{name}"] for name in FIELDS}
    for name, value in values.items():
        if value in OPEN:
            raise ValueError(f"{flag_name(f'video_{name}')} {value}: not filled in from the model")
    _check(values, tokens.num_channels)
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


def _check(values: Mapping[str, Any], num_channels: int) -> None:
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
