"""Read the files of Hugging Face image processors, and write them for models that were trained here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

from mimo.protocols import ImageProcessing
from providers.common.hf import LLAVA_PINPOINTS

IMAGE_TOKEN = "<image>"
# Files in which transformers looks for an image processor. The first has it under `image_processor`, and has priority.
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
# The video processor is under `video_processor` of the first, else in this file, else that of images.
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP = ImageProcessing("crop", CLIP_MEAN, CLIP_STD, source="CLIPImageProcessor")
SIGLIP = ImageProcessing("stretch", SIGLIP_MEAN, SIGLIP_STD, source="SiglipImageProcessor")
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # numbers of PIL.Image.Resampling
# Class defaults, which a file may leave out; a test compares them with the installed transformers.
_CLIP_DEFAULTS: dict[str, Any] = {
    "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224}, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "do_pad": False,
}
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": _CLIP_DEFAULTS,
    "LlavaImageProcessor": _CLIP_DEFAULTS,
    "SiglipImageProcessor": _CLIP_DEFAULTS | {
        "size": {"height": 224, "width": 224}, "do_center_crop": False, "crop_size": None,
        "image_mean": SIGLIP_MEAN, "image_std": SIGLIP_STD},
    "LlavaNextImageProcessor": _CLIP_DEFAULTS | {"do_pad": True, "image_grid_pinpoints": LLAVA_PINPOINTS},
}
# Processor of a model that cuts images into tiles itself.
TILING = "LlavaNextImageProcessor"
# Keys that change no pixel of an RGB image.
WITHOUT_EFFECT = frozenset({
    "image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "auto_map",
    "do_convert_rgb", "data_format", "input_data_format", "device", "disable_grouping", "return_tensors",
    "default_to_square", "_valid_processor_keys", "image_seq_length",
})


def read_processing(folder: str, side: int, *, any_size: bool,
                    pinpoints: Sequence[tuple[int, int]] = ()) -> ImageProcessing | None:
    """Read how a folder's image processor makes pixels.

    Args:
        folder: a Hugging Face folder or the config.json in it.
        side: pixels a side of the images that the encoder takes.
        any_size: whether the encoder takes images of any size. Only mean, deviation and kernel are then read.
        pinpoints: height and width of the grids of a model that cuts images into tiles; empty for others.

    Returns:
        The processing, or None if the folder has no image processor.

    Raises:
        ValueError: the file is not JSON, or has a value that is not supported; the message names file, key and value.
    """
    path, values = read_file(Path(folder))
    if values is None:
        return None
    name = str(values.get("image_processor_type") or values.get("feature_extractor_type"))
    kind = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    kinds = [each for each in PROCESSOR_DEFAULTS if (each == TILING) == bool(pinpoints)]
    allow_value(path, "image_processor_type", name, kind in kinds, ", ".join(kinds))
    # Published LLaVA-NeXT models name what their processor does anyway.
    is_named = kind == TILING and values.get("aspect_ratio_setting") == "anyres"
    ignored = WITHOUT_EFFECT | ({"aspect_ratio_setting"} if is_named else set())
    values, mean, std = complete_values(path, values, PROCESSOR_DEFAULTS[kind], ignored)
    tiling: Literal["stretch", "crop", "pad", "anyres", "dynamic"] = (
        "dynamic" if any_size else _tiling(path, kind, values, side))
    if pinpoints:
        own = [list(each) for each in pinpoints]
        allow_value(path, "image_grid_pinpoints", values["image_grid_pinpoints"],
                    [list(each) for each in values["image_grid_pinpoints"]] == own, f"{own}, as in config.json")
    return ImageProcessing(tiling, mean, std, RESAMPLE[values["resample"]], source=str(path))


def allow_value(path: Path, key: str, value: Any, is_allowed: bool, supported: str,
                flags: str = "--image-tiling, --image-resample, --image-mean and --image-std") -> None:
    if not is_allowed:
        raise ValueError(f"{path}: {key} = {value!r} is not supported; supported: {supported}. To ignore the file, "
                         f"give {flags}")


def complete_values(path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any], ignored: Set[str],
                    allow: Callable[..., None] = allow_value) -> (
        tuple[dict[str, Any], tuple[float, ...], tuple[float, ...]]):
    """Check what the processors of all families share, and complete the values of a file.

    Args:
        path: the file.
        values: its values.
        defaults: defaults of its class.
        ignored: further keys that are allowed and not read here.
        allow: raises the error for a value that is not supported, as `allow_value` does.

    Returns:
        The values of all keys that have defaults; mean and deviation, one number for all channels or one for each.
    """
    for key in sorted(values.keys() - defaults.keys() - ignored):
        allow(path, key, values[key], values[key] is None or values[key] is False, "null")
    found = {key: default if values.get(key) is None else values[key] for key, default in defaults.items()}
    allow(path, "do_rescale", found["do_rescale"], bool(found["do_rescale"]), "true")
    allow(path, "rescale_factor", found["rescale_factor"],
          math.isclose(found["rescale_factor"], 1 / 255, rel_tol=1e-6), f"{1 / 255}")
    allow(path, "resample", found["resample"], found["resample"] in RESAMPLE, "2 (bilinear), 3 (bicubic)")
    if not found["do_normalize"]:
        return found, (0.0,), (1.0,)
    mean, std = (tuple(map(float, found[key] if isinstance(found[key], list | tuple) else [found[key]]))
                 for key in ("image_mean", "image_std"))
    return found, mean, std


def _tiling(path: Path, kind: str, values: dict[str, Any], side: int) -> Literal["stretch", "crop", "pad", "anyres"]:
    """Return the tiling of a processor for images of `side` pixels a side. Raises the errors of `read_processing`."""
    square = {"height": side, "width": side}
    size, crop = values["size"], values["crop_size"]
    if isinstance(size, int):  # spelling of earlier releases of transformers
        size = {"height": size, "width": size} if kind == "SiglipImageProcessor" else {"shortest_edge": size}
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    allow_value(path, "do_resize", values["do_resize"], bool(values["do_resize"]), "true, as images have any size")
    allow_value(path, "size", size, size in ({"shortest_edge": side}, square),
                f"the {side} pixels a side that the encoder takes, as shortest_edge or as height and width")
    if values["do_center_crop"]:
        allow_value(path, "crop_size", crop, crop == square, f"the {side} x {side} pixels that the encoder takes")
    if kind == TILING:
        return "anyres"  # tiles have the size, so nothing is cropped
    if values["do_pad"]:
        allow_value(path, "do_pad", values["do_pad"], kind == "LlavaImageProcessor",
                    "true for LlavaImageProcessor alone")
        return "pad"
    allow_value(path, "do_center_crop", values["do_center_crop"], bool(values["do_center_crop"]) or size == square,
                "true where size is the shortest edge, as the encoder takes squares")
    return "stretch" if size == square else "crop"


def three(values: Sequence[float]) -> list[float]:
    """Return one value for each of red, green and blue."""
    return list(values) if len(values) == 3 else [values[0]] * 3


def read_file(folder: Path, key: Literal["image_processor", "video_processor"] = "image_processor") -> (
        tuple[Path, dict[str, Any] | None]):
    """Find the image or video processor of a folder as transformers does. Return it and its file, or None."""
    folder = folder.parent if folder.name.endswith(".json") else folder
    others = (PREPROCESSOR,) if key == "image_processor" else (VIDEO_PREPROCESSOR, PREPROCESSOR)
    for path in (folder / name for name in (PROCESSOR, *others)):
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if path.name == PROCESSOR and isinstance(values, dict):
            values = values.get(key)
        if isinstance(values, dict):
            return path, values
    return folder / PREPROCESSOR, None


def write_processing(folder: Path, side: int, processing: ImageProcessing,
                     pinpoints: Sequence[tuple[int, int]] = ()) -> str:
    """Write an image processor that makes these pixels; see `ImageProcessingProvider.write_image_processing`.

    `pinpoints` are the grids of a model that cuts images into tiles.
    """
    try:
        found = read_processing(str(folder), side, any_size=processing.tiling == "dynamic", pinpoints=pinpoints)
        if found == processing:
            return ""
    except ValueError:
        pass  # an unsupported processor is not the one of training either
    types = {"stretch": "SiglipImageProcessor", "crop": "CLIPImageProcessor", "pad": "LlavaImageProcessor"}
    if pinpoints:
        types = {"anyres": TILING}
    if processing.tiling not in types:
        return replace_processor(folder, None, processing)
    square, kind = {"height": side, "width": side}, types[processing.tiling]
    values = PROCESSOR_DEFAULTS[kind] | {
        "image_processor_type": kind, "size": square if kind == "SiglipImageProcessor" else {"shortest_edge": side},
        "crop_size": None if kind == "SiglipImageProcessor" else square,
        "do_pad": processing.tiling in ("pad", "anyres")}
    if pinpoints:
        values["image_grid_pinpoints"] = [list(each) for each in pinpoints]
    return replace_processor(folder, values, processing)


def replace_processor(folder: Path, values: Mapping[str, Any] | None, processing: ImageProcessing) -> str:
    """Write the image processor of a folder to both files in which transformers looks for it.

    Args:
        folder: the folder.
        values: its values, without those that all families share; None if no processor makes these pixels.
        processing: how pixels are made.

    Returns:
        A note on what the folder lacks, or an empty string.
    """
    path = folder / PROCESSOR
    outer = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    has_nested = outer.pop("image_processor", None) is not None
    note = ""
    if values is not None:
        values = {**values, "do_convert_rgb": True, "resample": resample_number(processing.resample),
                  "image_mean": three(processing.mean), "image_std": three(processing.std)}
        (folder / PREPROCESSOR).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if has_nested:
            outer["image_processor"] = values
    else:
        (folder / PREPROCESSOR).unlink(missing_ok=True)
        note = (f"it has no image processor, because no processor of this family makes the pixels of --image-tiling "
                f"{processing.tiling}, with which the model was trained")
    if has_nested:
        path.write_text(json.dumps(outer, indent=2) + "\n", encoding="utf-8")
    return note


def resample_number(name: str) -> int:
    return next(number for number, kernel in RESAMPLE.items() if kernel == name)


def write_llava(config: Any, folder: Path, mean: Sequence[float], std: Sequence[float],
                pinpoints: Sequence[tuple[int, int]] = ()) -> None:
    """Write a `LlavaProcessor` for images of the encoder's size, with a tokenizer of made-up words.

    Prompts are token ids, so only the tokenizer's image token is used. Images are neither resized nor cropped. With
    grids of tiles it is a `LlavaNextProcessor`, which cuts images of any size.

    Args:
        config: the family's flags, resolved.
        folder: folder of the model's config.json.
        mean: mean of each channel.
        std: deviation of each channel; pixels are (value / 255 - mean) / std.
        pinpoints: height and width of the grids of a model that cuts images into tiles; empty for others.
    """
    from transformers import CLIPImageProcessor, LlavaNextImageProcessor, LlavaNextProcessor, LlavaProcessor

    size = {"height": config.vision_image_size, "width": config.vision_image_size}
    given: dict[str, Any] = {"do_convert_rgb": False, "size": size, "crop_size": size, "image_mean": list(mean),
                             "image_std": list(std)}
    if pinpoints:
        images = LlavaNextImageProcessor(image_grid_pinpoints=[list(each) for each in pinpoints], **given)
    else:
        images = CLIPImageProcessor(do_resize=False, do_center_crop=False, **given)
    (LlavaNextProcessor if pinpoints else LlavaProcessor)(
        images, made_up_tokenizer(config.vocab_size, {IMAGE_TOKEN: config.image_token_id}),
        patch_size=config.vision_patch_size,
        vision_feature_select_strategy="default" if config.vision_class_token else "full",
        num_additional_image_tokens=int(config.vision_class_token)).save_pretrained(folder)


def made_up_tokenizer(vocab_size: int, special: Mapping[str, int]) -> Any:
    """Return a tokenizer with one made-up word for each id, and special tokens with theirs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{index}>": index for index in range(vocab_size) if index not in special.values()}
    first = next(iter(words))
    tokenizer = Tokenizer(models.WordLevel(words | dict(special), unk_token=first))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=first, unk_token=first,
                                   additional_special_tokens=list(special))
