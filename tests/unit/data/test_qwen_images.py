"""Pixels, patches, sizes and token counts of images are those of Qwen-VL's image processor in transformers."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from data.energon.provider import provider as energon
from data.image_tiling import tile_image, tile_sizes, tiling_of
from mimo.config.cli import parse
from mimo.data.encoder_inputs import PatchOrder, packed_patches
from mimo.registry import model_provider
from providers.common import qwen_processor

MODEL = ["--model-provider", "qwen2_5_vl", "--dataset-provider", "energon"]
ODD = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
LIMITS = {"min_pixels": 16 * 28 * 28, "max_pixels": 64 * 28 * 28}
PUBLISHED = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "Qwen2_5_VLProcessor"}


def setup(*flags):
    config = parse([*MODEL, *flags])
    provider = model_provider("qwen2_5_vl")
    return provider, config, tiling_of(config.dataset, provider.token_spec(config.model_family))


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", [PUBLISHED | LIMITS, PUBLISHED | LIMITS | ODD | {"resample": 2},
                                   {"image_processor_type": "Qwen2VLImageProcessor"}])
def test_random_images_become_what_transformers_makes_of_them(tmp_path, given, count):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    provider, config, tiling = setup("--load-hf", str(tmp_path))
    rng = np.random.default_rng(0)
    for _ in range(count):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(5), np.log(400), 2)))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = processor(image, return_tensors="np")
        (pixels,) = tile_image(image, tiling)
        (size,) = tile_sizes(height, width, tiling)
        inputs = packed_patches([pixels], [size], PatchOrder.of(provider.token_spec(config.model_family)),
                                torch.float32)
        grid = expected["image_grid_thw"][0]
        assert (1, size[0] // 14, size[1] // 14) == tuple(grid)
        assert provider.num_image_tokens(config.model_family, "vision", *size) == grid.prod() // 4
        found = inputs["pixel_values"][0].numpy()
        assert found.shape == expected["pixel_values"].shape
        levels = np.abs(found - expected["pixel_values"]).max() * 255 * max(tiling.std)
        assert levels < 1e-3, (height, width, levels)


def test_sizes_of_images_at_the_limits_are_those_of_transformers():
    smart_resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl").smart_resize
    _, _, tiling = setup("--min-patches", "64", "--max-patches", "1024")
    rng = np.random.default_rng(1)
    for _ in range(3000):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(3), np.log(3000), 2)))
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, 28, 64 * 196, 1024 * 196)
            assert tile_sizes(height, width, tiling) == [expected], (height, width)
    with pytest.raises(ValueError, match=re.escape("an image of 1 x 201 pixels (height x width) is too narrow")):
        tile_sizes(1, 201, tiling)


def test_without_a_file_images_are_those_of_the_published_models(tmp_path):
    _, _, family = setup()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    _, _, published = setup("--load-hf", str(tmp_path))
    assert family == published and (family.min_patches, family.max_patches) == (16, 65536)


@pytest.mark.parametrize(("change", "message"), [
    ({"patch_size": 16}, "patch_size = 16 is not supported; supported: 14, as the model has it"),
    ({"merge_size": 4}, "merge_size = 4 is not supported; supported: 2"),
    ({"size": 336}, "size = 336 is not supported; supported: shortest_edge and longest_edge, in pixels"),
    ({"max_pixels": 1000}, "max_pixels = 1000 is not supported; supported: multiples of 196"),
    ({"do_resize": False}, "do_resize = False is not supported"),
    ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type = 'CLIPImageProcessor' is not supported"),
    ({"do_pad": True}, "do_pad = True is not supported"),
])
def test_what_a_file_asks_for_and_is_not_done_is_refused_by_name(tmp_path, change, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        setup("--load-hf", str(tmp_path))


def test_class_defaults_are_those_of_transformers():
    theirs = Qwen2VLImageProcessor()
    for key, value in qwen_processor.DEFAULTS.items():
        found = getattr(theirs, key)
        assert (dict(found) if key == "size" else found) == (list(value) if isinstance(value, tuple) else value) or (
            tuple(found) == value), key


def test_an_export_has_the_processor_of_training(tmp_path):
    flags = [*MODEL, "--min-patches", "64", "--max-patches", "4096", "--image-mean", "0.5", "--image-std", "0.25"]
    config = parse(flags)
    provider = model_provider("qwen2_5_vl")
    processing = energon.image_processing(config.dataset, provider.token_spec(config.model_family))
    assert provider.write_image_processing(config.model_family, tmp_path, processing) == ""
    again = provider.image_processing(config.model_family, str(tmp_path))
    three = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    assert again == dataclasses.replace(processing, **three)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(theirs).__name__.startswith("Qwen2VLImageProcessor")
    assert (theirs.size["shortest_edge"], theirs.size["longest_edge"]) == (64 * 196, 4096 * 196)
