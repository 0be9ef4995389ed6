"""Convert between a `NemotronH_Nano_VL_V2` configuration and the RADIO flags, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mimo.protocols import ImageProcessing
from providers.common.checks import image_flags
from providers.common.hf_processor import made_up_tokenizer
from providers.common.hf_text import allow, check_kind
from providers.radio import NUM_CHANNELS, RadioConfig

# Sizes of timm's models: width, layers, heads, inner width.
SIZE_FIELDS = ("vision_hidden_size", "vision_num_layers", "vision_num_attention_heads", "vision_ffn_hidden_size")
TIMM_SIZES = {
    "vit_small_patch16_224": (384, 12, 6, 1536), "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096), "vit_huge_patch16_224": (1280, 32, 16, 5120),
}
# If no timm model has the sizes, they are under these names, which other vision models use.
SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NORM_EPSILON, PROJECTOR_EPSILON = 1e-6, 1e-5
# Keys of which the encoder here supports only these values.
VISION_FIXED: dict[str, tuple[Any, ...]] = {
    "vitdet_window_size": (None,), "feature_normalizer_config": (None,), "inter_feature_normalizer_config": (None,),
}
# Kinds of values by section and key. All of them may be null.
KINDS: dict[str, dict[str, type]] = {
    "": {"force_image_size": int, "patch_size": int, "vit_hidden_size": int, "projector_hidden_size": int,
         "downsample_ratio": float},
    "vision_config.": {"patch_size": int, "max_resolution": int, "min_num_patches": int, "preferred_resolution": tuple,
                       **dict.fromkeys(SIZE_KEYS, int)},
    "vision_config.args.": {"cpe_max_size": int, "cpe_num_registers": int, "register_multiple": int,
                            "min_num_patches": int, "model_norm": bool, "cls_token_per_teacher": bool},
}
# Value that vLLM's DynamicResolutionImageTiler asserts, and the word that its processor takes for an image.
ENGINE_PIXEL_SHUFFLE, IMAGE_WORD = 2, "<image>"
# vLLM's DEFAULT_NUM_TILES.
MAX_TILES = 12
IMAGE_SIZE, PATCH_SIZE, MAX_IMAGE_SIZE = 512, 16, 2048
PIXEL_MEAN, PIXEL_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def radio_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `RadioConfig` that the configuration of the whole model sets.

    Args:
        values: the configuration as a dict; keys of sound and video are ignored.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    vision = _section(values, "", "vision_config")
    args = _section(vision, "vision_config.", "args")
    for section, part in (("", values), ("vision_config.", vision), ("vision_config.args.", args)):
        for key, kind in KINDS[section].items():
            if part.get(key) is not None:
                check_kind(section, key, part[key], kind)
    for key, allowed in VISION_FIXED.items():
        allow("vision_config.", key, vision.get(key), allowed)
    allow("vision_config.args.", "in_chans", args.get("in_chans"), (None, NUM_CHANNELS))
    # Other versions exchange rows and columns of patches.
    allow("", "ps_version", values.get("ps_version", "v2"), ("v2",))
    patch_size = vision.get("patch_size") or values.get("patch_size") or PATCH_SIZE
    allow("", "patch_size", values.get("patch_size", patch_size), (patch_size,))
    sizes = _transformer_sizes(vision, args)
    dynamic = bool(args.get("min_num_patches") or vision.get("min_num_patches"))
    allow("", "vit_hidden_size", values.get("vit_hidden_size", sizes["vision_hidden_size"]),
          (sizes["vision_hidden_size"],))
    return {
        **sizes,
        **_image_size(values, vision, dynamic),
        "vision_patch_size": patch_size,
        "vision_num_channels": NUM_CHANNELS,
        "vision_dynamic_resolution": dynamic,
        "vision_pixel_shuffle": _pixel_shuffle(0.5 if (ratio := values.get("downsample_ratio")) is None else ratio),
        "vision_class_token_len": _class_tokens(args),
        "vision_max_image_size": args.get("cpe_max_size") or vision.get("max_resolution") or MAX_IMAGE_SIZE,
        "vision_final_layernorm": bool(args.get("model_norm")),
        "vision_norm_epsilon": NORM_EPSILON,
        "vision_hidden_act": "gelu",
        "projector_hidden_size": values.get("projector_hidden_size") or 4096,
        "projector_norm_epsilon": PROJECTOR_EPSILON,
    }


def radio_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a whole model's or an encoder's configuration by field of a `RadioConfig`."""
    vision = values.get("vision_config") or values
    args = vision.get("args") or {}

    def key_of(key: str, outer: str) -> str:
        return f"vision_config.{outer}" if args.get(key) is None and vision.get(outer) is not None else (
            f"vision_config.args.{key}")

    is_sized = all(vision.get(key) is not None for key in SIZE_KEYS)
    image = "force_image_size" if values.get("force_image_size") else "vision_config.preferred_resolution"
    # What has no key belongs to the type.
    return {
        **{field: f"vision_config.{key}" if is_sized else "vision_config.args.model"
           for field, key in zip(SIZE_FIELDS, SIZE_KEYS, strict=True)},
        "vision_image_size": image, "vision_image_width": image,
        "vision_patch_size": "patch_size" if vision.get("patch_size") is None else "vision_config.patch_size",
        "vision_num_channels": "vision_config.args.in_chans",
        "vision_dynamic_resolution": key_of("min_num_patches", "min_num_patches"),
        "vision_class_token_len": "vision_config.args." + (
            "cpe_num_registers" if args.get("cpe_num_registers") else "register_multiple"),
        "vision_max_image_size": key_of("cpe_max_size", "max_resolution"),
        "vision_final_layernorm": "vision_config.args.model_norm",
        **dict.fromkeys(("vision_norm_epsilon", "vision_hidden_act", "projector_norm_epsilon"), "model_type"),
    }


def _section(values: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    found: dict[str, Any] = values.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"--hf-config: {section}{key} = {found!r} is not an object")
    return found


def _transformer_sizes(vision: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    if all(vision.get(key) is not None for key in SIZE_KEYS):
        return dict(zip(SIZE_FIELDS, (vision[key] for key in SIZE_KEYS), strict=True))
    allow("vision_config.args.", "model", args.get("model"), tuple(TIMM_SIZES))
    return dict(zip(SIZE_FIELDS, TIMM_SIZES[args["model"]], strict=True))


def _image_size(values: dict[str, Any], vision: dict[str, Any], dynamic: bool) -> dict[str, int]:
    """Return the side of a model's images, or else the height and width that its encoder prefers."""
    forced = values.get("force_image_size")
    preferred = vision.get("preferred_resolution") or (IMAGE_SIZE, IMAGE_SIZE)
    if len(preferred) != 2:
        raise ValueError(f"--hf-config: vision_config.preferred_resolution = {preferred} is not a list of two sides")
    height, width = (forced, forced) if forced else preferred
    sizes = {"vision_image_size": height}
    return sizes if dynamic or width == height else sizes | {"vision_image_width": width}


def _pixel_shuffle(ratio: float) -> int:
    factor = round(1 / ratio) if ratio > 0 else 0
    if factor < 1 or ratio * factor != 1:
        raise ValueError(f"--hf-config: downsample_ratio = {ratio} is not supported; supported: 1 over a whole number")
    return factor


def _class_tokens(args: dict[str, Any]) -> int:
    """Count class tokens and registers.

    There is one class token, or one for each teacher. Either there is a given number of registers, or they fill up to
    the next multiple. If the class tokens are a multiple already, a whole multiple is added.
    """
    given, each_has_one = args.get("teachers") or [], args.get("cls_token_per_teacher")
    if not isinstance(given, list) or not all(isinstance(each, dict) and "name" in each for each in given):
        raise ValueError(f"--hf-config: vision_config.args.teachers = {given!r} is not a list of objects with a name")
    teachers = {str(teacher["name"]) for teacher in given}
    count = len(teachers) if teachers and (each_has_one is None or each_has_one) else 1
    multiple = args.get("register_multiple")
    if args.get("cpe_num_registers"):
        count += args["cpe_num_registers"]
    elif multiple:
        count += multiple - count % multiple
    return count


def radio_config(config: RadioConfig) -> dict[str, Any]:
    """Return the keys of the whole model's configuration for encoder and projector.

    Raises:
        ValueError: a value that the published encoder cannot have.
    """
    fixed = {"vision_hidden_act": "gelu", "vision_norm_epsilon": NORM_EPSILON,
             "projector_norm_epsilon": PROJECTOR_EPSILON}
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: NemotronH_Nano_VL_V2 has {value} "
                             "built in")
    height, width = config.image_shape
    if height != width:
        raise ValueError(f"{image_flags(height, width)}: NemotronH_Nano_VL_V2 has images of one size as squares alone "
                         "(force_image_size); with --vision-dynamic-resolution --vision-image-width 0 it takes images "
                         "of this shape too, with the same weights and features")
    tokens = config.vision_class_token_len
    if tokens < 1:
        raise ValueError(f"--vision-class-token-len {tokens}: NemotronH_Nano_VL_V2 has at least one class token")
    sizes = tuple(getattr(config, name) for name in SIZE_FIELDS)
    model = next((name for name, known in TIMM_SIZES.items() if known == sizes), None)
    # All of them are dropped, so it does not matter which are class tokens and which registers.
    args: dict[str, Any] = {"model": model, "cpe_max_size": config.vision_max_image_size, "teachers": [],
                            "cls_token_per_teacher": False, "register_multiple": tokens if tokens > 1 else None,
                            "model_norm": config.vision_final_layernorm}
    vision: dict[str, Any] = {
        "architectures": ["RADIOModel"], "args": args, "patch_size": config.vision_patch_size,
        "max_resolution": config.vision_max_image_size, "preferred_resolution": [height, width],
        "vitdet_window_size": None, "feature_normalizer_config": None, "inter_feature_normalizer_config": None,
    }
    if config.vision_dynamic_resolution:
        patches = {"min_num_patches": config.vision_pixel_shuffle**2, "max_num_patches": config.num_positions}
        args.update(patches)  # some engines read one, some the other
        vision.update(patches)
    if model is None:
        vision.update(zip(SIZE_KEYS, sizes, strict=True))
    return {
        "vision_config": vision,
        "force_image_size": height,
        "patch_size": config.vision_patch_size,
        "downsample_ratio": 1 / config.vision_pixel_shuffle,
        "ps_version": "v2",
        "vit_hidden_size": config.vision_hidden_size,
        "projector_hidden_size": config.projector_hidden_size,
        "norm_mean": PIXEL_MEAN, "norm_std": PIXEL_STD,
    }


def radio_processing(values: dict[str, Any], config: RadioConfig, source: str) -> ImageProcessing:
    """Return how vLLM's processor of `NemotronH_Nano_VL_V2` makes pixels (`BaseNanoNemotronVLProcessor`).

    Args:
        values: the configuration as a dict; missing keys have the values of the published models.
        config: the encoder's flags.
        source: the configuration, for messages.

    Raises:
        ValueError: a value of another type; the message names the key.
    """
    mean, std = (tuple(map(float, values.get(key) or default))
                 for key, default in (("norm_mean", PIXEL_MEAN), ("norm_std", PIXEL_STD)))
    if config.vision_dynamic_resolution:
        vision = values.get("vision_config") or {}
        fewest, most = ((vision.get("args") or {}).get(key, vision.get(key))
                        for key in ("min_num_patches", "max_num_patches"))
        # For the engine 0 means any number.
        return ImageProcessing("dynamic", mean, std, min_patches=fewest or 0,
                               max_patches=-1 if most is not None and most <= 0 else most or 0, source=source)
    height, width = config.image_shape
    if height != width:
        return ImageProcessing("stretch", mean, std, source=source)
    return ImageProcessing("fixed", mean, std, max_tiles=MAX_TILES, use_thumbnail=values.get("use_thumbnail", True),
                           source=source)


def with_radio_processing(values: dict[str, Any], config: RadioConfig, processing: ImageProcessing) -> (
        tuple[dict[str, Any], str]):
    """Add the image processing of training to a configuration.

    Returns:
        The configuration, and why engines make other pixels; empty if they make the same.
    """
    mean, std = (value if len(value) == 3 else value * 3 for value in (processing.mean, processing.std))
    values = values | {"norm_mean": list(mean), "norm_std": list(std)}
    if processing.tiling == "dynamic" and config.vision_dynamic_resolution:
        patches = {"min_num_patches": processing.min_patches, "max_num_patches": processing.max_patches}
        vision = values["vision_config"]
        values["vision_config"] = {**vision, "args": {**vision["args"], **patches}, **patches}
    if processing.tiling == "fixed":
        values["use_thumbnail"] = processing.use_thumbnail
    served = radio_processing(values, config, "")
    if processing.resample != served.resample or processing.tiling != served.tiling:
        return values, (f"engines make pixels with --image-tiling {served.tiling} --image-resample {served.resample}; "
                        f"this model was trained with {processing.tiling} and {processing.resample}")
    if processing.min_side:
        return values, ("engines do not enlarge narrow images; this model was trained with --min-side "
                        f"{processing.min_side}")
    if processing.tiling == "fixed" and processing.max_tiles != MAX_TILES:
        return values, (f"engines make up to {MAX_TILES} tiles of an image; this model was trained with --max-tiles "
                        f"{processing.max_tiles}: give vLLM --mm-processor-kwargs "
                        f"'{{\"max_num_tiles\": {processing.max_tiles}}}'")
    return values, ""


def check_radio_processor(config: RadioConfig) -> None:
    """Raise ValueError, with flags and values, if vLLM's processor or encoder would compute something else."""
    if config.vision_pixel_shuffle != ENGINE_PIXEL_SHUFFLE:
        raise ValueError(f"--vision-pixel-shuffle {config.vision_pixel_shuffle}: vLLM's NemotronH_Nano_VL_V2 has "
                         f"{ENGINE_PIXEL_SHUFFLE} built in")
    if config.vision_cpe_augmentation:
        raise ValueError("--vision-cpe-augmentation: the trainer would draw random crops of positions, and the rollout "
                         "engine would not; leave it out")
    if config.vision_dynamic_resolution and config.vision_image_size == config.vision_max_image_size:
        raise ValueError(f"--vision-image-size {config.vision_image_size} equals --vision-max-image-size, so vLLM "
                         "would cut the positions of smaller images out of the grid instead of interpolating them. It "
                         "has no other effect with --vision-dynamic-resolution: give another value")


def write_radio_processor(config: RadioConfig, image_token_id: int, vocab_size: int, folder: Path,
                          mean: Sequence[float], std: Sequence[float]) -> None:
    """Change a folder so that vLLM's processor leaves the sizes of images as they are; see `ImageProcessorProvider`.

    The processor is part of vLLM. It reads config.json and puts the words `<img>` and `</img>` around the tokens of an
    image. The tokenizer removes these words, because prompts that need them have them among their own tokens.

    Args:
        config: the encoder's flags.
        image_token_id: token that stands for an image.
        vocab_size: number of tokens.
        folder: folder of the config.json.
        mean: mean of each channel.
        std: deviation of each channel; pixels are (value / 255 - mean) / std.
    """
    from tokenizers import normalizers

    kind = "dynamic" if config.vision_dynamic_resolution else "fixed"
    # 0 is no limit. Images that are too long for --seq-length are refused with their prompts.
    processing = ImageProcessing(kind, tuple(mean), tuple(std), min_patches=config.vision_pixel_shuffle**2,
                                 max_patches=0, max_tiles=MAX_TILES)
    path = folder / "config.json"
    values, _ = with_radio_processing(json.loads(path.read_text(encoding="utf-8")), config, processing)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer = made_up_tokenizer(vocab_size, {IMAGE_WORD: image_token_id})
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(word, "") for word in ("<img>", "</img>")])
    tokenizer.save_pretrained(folder)
