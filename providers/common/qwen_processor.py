"""Read and write the image and video processor files of the Qwen-VL families."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mimo.protocols import ImageProcessing, VideoProcessing
from providers.common.hf_processor import (
    CLIP_MEAN,
    CLIP_STD,
    PROCESSOR,
    RESAMPLE,
    SIGLIP_MEAN,
    SIGLIP_STD,
    VIDEO_PREPROCESSOR,
    WITHOUT_EFFECT,
    allow_value,
    complete_values,
    made_up_tokenizer,
    read_file,
    replace_processor,
    resample_number,
)
from providers.common.qwen_vision import QwenVisionConfig

# Patches of the largest image that a processor for a rollout engine leaves as it is, as in the published models.
PROCESSED_PATCHES = 65536
KINDS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
# Class defaults, which a file may leave out; a test compares them with the installed transformers.
DEFAULTS: dict[str, Any] = {
    "do_resize": True, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "resample": 3,
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
}
# Limits of pixels as earlier releases of transformers spell them.
LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
# The classes of video processors by the rule that they follow, and their defaults.
VIDEO_KINDS: dict[Literal["qwen2_5_vl", "qwen3_vl"], str] = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}
_VIDEO_DEFAULTS: dict[str, Any] = {key: DEFAULTS[key] for key in (
    "do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "merge_size", "temporal_patch_size")} | {
    "min_frames": 4, "max_frames": 768, "num_frames": None, "cap_pixels_per_frame": None}
VIDEO_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _VIDEO_DEFAULTS | {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD, "patch_size": 14, "do_sample_frames": False, "fps": None, "max_video_tokens": 128000},
    "qwen3_vl": _VIDEO_DEFAULTS | {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "image_mean": SIGLIP_MEAN,
        "image_std": SIGLIP_STD, "patch_size": 16, "do_sample_frames": True, "fps": 2, "max_video_tokens": 768},
}
VIDEO_FLAGS = "--video-processing and all other --video-... flags"
# Keys of video processors that change no pixel.
WITHOUT_VIDEO_EFFECT = WITHOUT_EFFECT | {"video_processor_type", "return_metadata"}


def read_qwen_processing(folder: str, config: QwenVisionConfig) -> ImageProcessing | None:
    """Read how a folder's image processor makes pixels.

    Args:
        folder: a Hugging Face folder or the config.json in it.
        config: the encoder.

    Returns:
        The processing, or None if the folder has no image processor.

    Raises:
        ValueError: the file is not JSON, or has a value that is not supported; the message names file, key and value.
    """
    path, values = read_file(Path(folder))
    if values is None:
        return None
    name = str(values.get("image_processor_type"))
    allow_value(path, "image_processor_type", name, name.removesuffix("Fast").removesuffix("Pil") in KINDS,
                ", ".join(KINDS))
    found, mean, std = complete_values(path, values, DEFAULTS, WITHOUT_EFFECT | LIMITS.keys())
    _check_patches(path, found, config, allow_value)
    patches = [_patches(path, values, found["size"], key, config.vision_patch_size) for key in LIMITS]
    return ImageProcessing("smart_resize", mean, std, RESAMPLE[found["resample"]], min_patches=patches[0],
                           max_patches=patches[1], source=str(path))


def _check_patches(path: Path, found: dict[str, Any], config: QwenVisionConfig, allow: Callable[..., None]) -> None:
    """Refuse a processor that does not resize, has no limits of pixels, or whose patches are not the model's."""
    for key, expected in (("do_resize", True), ("patch_size", config.vision_patch_size),
                          ("temporal_patch_size", config.vision_temporal_patch_size),
                          ("merge_size", config.vision_spatial_merge_size)):
        allow(path, key, found[key], found[key] == expected, f"{expected}, as the model has it")
    allow(path, "size", found["size"], isinstance(found["size"], dict), "shortest_edge and longest_edge, in pixels")


def _patches(path: Path, values: dict[str, Any], size: dict[str, Any], key: str, patch_size: int) -> int:
    """Return a limit of pixels, `min_pixels` or `max_pixels`, in patches. Raises ValueError if it is not whole."""
    pixels = values.get(key)
    if pixels is None:
        pixels = size.get(LIMITS[key], size.get(key))
    area = patch_size**2
    is_whole = isinstance(pixels, int) and pixels > 0 and pixels % area == 0
    allow_value(path, key, pixels, is_whole, f"multiples of {area}, the pixels of a patch")
    assert isinstance(pixels, int)
    return pixels // area


def write_qwen_processing(folder: Path, config: QwenVisionConfig, processing: ImageProcessing) -> str:
    """Write an image processor that makes these pixels; see `ImageProcessingProvider.write_image_processing`."""
    try:
        if read_qwen_processing(str(folder), config) == processing:
            return ""
    except ValueError:
        pass  # an unsupported processor is not the one of training either
    if processing.tiling != "smart_resize":
        return replace_processor(folder, None, processing)
    area = config.vision_patch_size**2
    limits = {"min_pixels": processing.min_patches * area, "max_pixels": processing.max_patches * area}
    return replace_processor(folder, DEFAULTS | limits | {
        "image_processor_type": KINDS[0], "size": {LIMITS[key]: pixels for key, pixels in limits.items()},
        "patch_size": config.vision_patch_size, "temporal_patch_size": config.vision_temporal_patch_size,
        "merge_size": config.vision_spatial_merge_size}, processing)


def read_qwen_video_processing(folder: str, config: QwenVisionConfig, rule: Literal["qwen2_5_vl", "qwen3_vl"]) -> (
        VideoProcessing | None):
    """Read how a folder's video processor makes pixels.

    Args:
        folder: a Hugging Face folder or the config.json in it.
        config: the encoder.
        rule: the family.

    Returns:
        The processing, or None if the folder has no video processor. Without one, transformers takes the limits of the
        image processor for videos of Qwen2.5-VL.

    Raises:
        ValueError: the file is not JSON, or has a value that is not supported; the message names file, key and value.
    """
    path, values = read_file(Path(folder), "video_processor")
    of_images = values is not None and "image_processor_type" in values
    if values is None or (of_images and rule == "qwen3_vl"):
        return None

    allow = partial(allow_value, flags=VIDEO_FLAGS)
    kind, defaults = VIDEO_KINDS[rule], VIDEO_DEFAULTS[rule]
    name = values.get("video_processor_type", kind)
    allow(path, "video_processor_type", name, name == kind, kind)
    limits = LIMITS if rule == "qwen2_5_vl" else {}
    found, mean, std = complete_values(path, values, defaults, WITHOUT_VIDEO_EFFECT | limits.keys(), allow)
    if not found["do_normalize"]:
        mean, std = (0.0,) * 3, (1.0,) * 3
    _check_patches(path, found, config, allow)
    pixels = {}
    for key, name in LIMITS.items():
        given = values.get(key) if key in limits else None
        pixels[key] = found["size"].get(name, found["size"].get(key)) if given is None else given
        allow(path, key, pixels[key], isinstance(pixels[key], int) and pixels[key] > 0, "a number of pixels")
    samples = bool(found["do_sample_frames"])
    number = int(found["num_frames"] or 0) if samples else 0
    rate = float(values.get("fps", defaults["fps"]) or 0) if samples else 0.0
    # transformers fails with both, and its class for Qwen3-VL chooses frames differently with neither.
    allow(path, "num_frames", number, not (number and rate), f"null beside fps {rate:g}, or this beside fps null")
    allow(path, "fps", None, bool(number or rate) or not samples or rule == "qwen2_5_vl", "a number")
    return VideoProcessing(
        rule, mean, std, rate, found["min_frames"], found["max_frames"],
        **pixels, temporal_patch_size=found["temporal_patch_size"], timestamps=rule == "qwen3_vl",
        resample=RESAMPLE[found["resample"]], num_frames=number,
        max_tokens=found["max_video_tokens"] if found["cap_pixels_per_frame"] else 0, source=str(path))


def write_qwen_video_processing(folder: Path, config: QwenVisionConfig, processing: VideoProcessing, *,
                                always: bool = False) -> None:
    """Write a video processor that chooses these frames and makes these pixels; if not `always`, unless it is there."""
    rule = processing.rule
    try:
        if not always and read_qwen_video_processing(str(folder), config, rule) == processing:
            return
    except ValueError:
        pass  # an unsupported processor is not the one of training either
    samples = bool(processing.fps or processing.num_frames)
    values = VIDEO_DEFAULTS[rule] | {
        "video_processor_type": VIDEO_KINDS[rule],
        "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        "resample": resample_number(processing.resample),
        "image_mean": list(processing.mean), "image_std": list(processing.std),
        "patch_size": config.vision_patch_size, "temporal_patch_size": config.vision_temporal_patch_size,
        "merge_size": config.vision_spatial_merge_size, "min_frames": processing.min_frames,
        "max_frames": processing.max_frames, "do_sample_frames": samples,
        "cap_pixels_per_frame": bool(processing.max_tokens)}
    if samples:
        values |= {"fps": processing.fps or None, "num_frames": processing.num_frames or None}
    if processing.max_tokens:
        values["max_video_tokens"] = processing.max_tokens
    (folder / VIDEO_PREPROCESSOR).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    path = folder / PROCESSOR
    if path.is_file():
        outer = json.loads(path.read_text(encoding="utf-8"))
        if outer.pop("video_processor", None) is not None:
            path.write_text(json.dumps(outer | {"video_processor": values}, indent=2) + "\n", encoding="utf-8")


# Special tokens of the family's processors -> fields of a provider's `Config`.
SPECIAL_TOKENS = {"<|image_pad|>": "image_token_id", "<|video_pad|>": "video_token_id",
                  "<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id"}


def check_special_tokens(config: Any) -> None:
    """Raise ValueError unless the special tokens are different ids of the vocabulary, as a processor needs them."""
    ids = {field: getattr(config, field) for field in SPECIAL_TOKENS.values()}
    given = " ".join(f"--{field.replace('_', '-')} {number}" for field, number in ids.items())
    if len(set(ids.values())) < len(ids) or not all(0 <= number < config.vocab_size for number in ids.values()):
        raise ValueError(f"{given}: the processor of a rollout engine needs four different ids below --vocab-size "
                         f"{config.vocab_size}")


def write_qwen(config: Any, folder: Path, mean: Sequence[float], std: Sequence[float],
               kind: Literal["Qwen2_5_VL", "Qwen3VL"]) -> None:
    """Write a processor for images whose sizes the encoder takes, with a tokenizer of made-up words.

    Prompts are token ids, so only the tokenizer's special tokens are used. Images keep their sizes.

    Args:
        config: the family's flags, resolved.
        folder: folder of the model's config.json.
        mean: mean of each channel.
        std: deviation of each channel; pixels are (value / 255 - mean) / std.
        kind: family whose classes are written.
    """
    from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    check_special_tokens(config)
    values = {
        "size": {"shortest_edge": config.size_multiple**2,
                 "longest_edge": PROCESSED_PATCHES * config.vision_patch_size**2},
        "image_mean": list(mean), "image_std": list(std), "patch_size": config.vision_patch_size,
        "temporal_patch_size": config.vision_temporal_patch_size, "merge_size": config.vision_spatial_merge_size}
    special = {token: getattr(config, field) for token, field in SPECIAL_TOKENS.items()}
    processor, videos = {"Qwen2_5_VL": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
                         "Qwen3VL": (Qwen3VLProcessor, Qwen3VLVideoProcessor)}[kind]
    processor(Qwen2VLImageProcessor(**values), made_up_tokenizer(config.vocab_size, special),
              videos(**values)).save_pretrained(folder)


def write_qwen_tokenizer(config: Any, folder: Path, tokenizer: Any) -> None:
    """Save a Hugging Face tokenizer in place of the made-up one.

    Raises:
        ValueError: its special tokens are not the model's.
    """
    known = tokenizer.get_vocab()
    for token, field in SPECIAL_TOKENS.items():
        if known.get(token) != getattr(config, field):
            raise ValueError(f"--{field.replace('_', '-')} {getattr(config, field)}: the rollout engine takes videos "
                             f"with a tokenizer whose {token} is this token; the prompts' tokenizer "
                             f"{tokenizer.name_or_path} has {known.get(token, 'none')}")
    # Completions end only where the prompt set says.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
