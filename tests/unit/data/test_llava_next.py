"""Tokens, pixels and figures of LLaVA-NeXT, against transformers' processor."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from data import character_tokenizer
from data.conversation_files.prompts import provider
from data.image_tiling import tile_image, tile_sizes, tiling_of
from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.config.validate import validate
from mimo.grid.dry_run import dry_run_report
from mimo.registry import model_provider
from mimo.rl.images import as_request
from mimo.visual import Tiles
from providers import llava_next

PROVIDER = llava_next.provider
GRIDS = ["28x56", "56x28", "56x56", "84x28", "28x84"]
FLAGS = ["--model-provider", "llava_next", "--dataset-provider", "energon", "--vision-image-size", "28",
         "--vision-patch-size", "14", "--vision-image-grid-pinpoints", *GRIDS]


def processor_of(config: Any, folder: Path) -> Any:
    """The processor that is written for the rollout engine."""
    PROVIDER.write_processor(config, folder, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    return transformers.AutoProcessor.from_pretrained(folder)


def images(count: int) -> list[Image.Image]:
    """Noise of random sizes up to 1 : 60, the first ones narrow, tiny or of a grid's own size."""
    rng = np.random.default_rng(0)
    sizes = [(1, 60), (90, 2), (1, 1), (28, 28), (56, 56), (28, 84)]
    sizes += [tuple(map(int, rng.integers(1, 200, size=2))) for _ in range(count - len(sizes))]
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_tokens_and_pixels_are_those_of_transformers(tmp_path: Path, count: int) -> None:
    config = parse([*FLAGS, "--image-mean", "0.1", "0.2", "0.3", "--image-std", "0.5", "0.6", "0.7"])
    family, processor = config.model_family, processor_of(config.model_family, tmp_path)
    assert type(processor).__name__ == "LlavaNextProcessor"
    spec = PROVIDER.token_spec(family)
    tiling = tiling_of(config.dataset, spec)
    assert (tiling.kind, tiling.is_joined) == ("anyres", True)
    for image in images(count):
        size = image.height, image.width
        theirs = processor(images=image, text="<image>", return_tensors="np")
        assert tile_sizes(*size, tiling) == [size]
        assert PROVIDER.num_image_tokens(family, "vision", *size) == theirs["input_ids"].size, size
        found = np.stack(tile_image(image, tiling))
        (pixels,) = theirs["pixel_values"]
        assert found.shape == pixels.shape == spec.pixel_shape(size), size
        assert float(np.abs(found - pixels).max() * 0.7 * 255) < 1e-3, size


def test_prompts_have_whole_images_for_the_engine_and_tiles_for_the_encoder(tmp_path: Path) -> None:
    family = parse([*FLAGS, "--image-token-id", "120", "--vocab-size", "128"]).model_family
    pixels = np.random.default_rng(0).integers(0, 256, (30, 80, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text(json.dumps({"image": "a.png", "question": "what?", "answer": "noise"}))
    config = provider.Config(data_path=str(tmp_path), tokenizer=str(character_tokenizer.write(tmp_path / "tokenizer")),
                             prompt_format="plain", image_tiling="anyres", image_resample="bicubic", image_mean=(0.5,),
                             image_std=(0.5,))
    prompt = provider.open(config, PROVIDER.token_spec(family), "train", 0).prompt(0)
    assert prompt.token_ids.count(120) == 1 and prompt.image_sizes == ((30, 80),)
    (tiles,) = prompt.pictures()
    assert tiles.shape == (4, 28, 28, 3) and tiles.dtype == np.uint8
    (image,) = as_request(prompt)["multi_modal_data"]["image"]
    assert np.array_equal(np.asarray(image), pixels)
    expected = processor_of(family, tmp_path / "model")(images=image, text="<image>", return_tensors="np")
    levels = (expected["pixel_values"][0] * np.reshape((0.5, 0.6, 0.7), (3, 1, 1)) +
              np.reshape((0.1, 0.2, 0.3), (3, 1, 1))) * 255
    assert float(np.abs(levels - np.moveaxis(tiles, -1, -3)).max()) < 1e-3


def test_an_image_has_as_many_tokens_as_published() -> None:
    """The number that vLLM 0.4 took as --image-feature-size of llava-v1.6-mistral-7b for its largest image."""
    assert PROVIDER.num_image_tokens(llava_next.Config(), "vision", 560, 560) == 2928


def test_the_order_of_tokens_skips_borders_and_ends_rows() -> None:
    tiles = Tiles((2, 2), ((2, 4),), (2, 2))
    # The grid of 2 x 4 tokens shows an image of 1 x 4 in one of its rows at most: a border of half a row is kept.
    assert tiles.token_order(2, 4).tolist() == [0, 1, 2, 3, 4, 5, 8, 9, -1, 6, 7, 10, 11, -1]
    assert tiles.token_order(2, 2).tolist() == [0, 1, 2, 3, 5, 8, -1, 7, 10, -1]
    assert tiles.num_joined(2, 2) == 10 and tiles.count(2, 2) == 3


@pytest.mark.parametrize(("flags", "message"), [
    (["--vision-image-grid-pinpoints", "28x57"], "28x57: need grids of tiles, multiples of --vision-image-size 28"),
    (["--vision-image-grid-pinpoints", "2by2"], "--vision-image-grid-pinpoints 2by2: expected HEIGHTxWIDTH"),
    (["--vision-pixel-shuffle", "2"], "it has neither --vision-dynamic-resolution nor --vision-pixel-shuffle"),
])
def test_sizes_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    config = parse([*FLAGS, *flags])
    with pytest.raises(ValueError, match=message):
        PROVIDER.validate_sizes(config.model_family)


@pytest.mark.parametrize(("flags", "message"), [
    (["--image-tiling", "crop"], "--image-tiling crop: the model joins the tiles of --image-tiling anyres"),
    (["--image-grid-pinpoints", "28x56"], "--image-grid-pinpoints 28x56: the model has 28x56 56x28 .* leave the flag"),
])
def test_other_tiles_than_the_model_s_are_refused(flags: list[str], message: str) -> None:
    config = parse([*FLAGS, *flags])
    with pytest.raises(ValueError, match=message):
        tiling_of(config.dataset, PROVIDER.token_spec(config.model_family))


def test_tiles_that_vllm_would_resize_in_another_way_are_refused_before_rl(tmp_path: Path) -> None:
    tokenizer = character_tokenizer.write(tmp_path / "tokenizer")
    flags = [*FLAGS, "--dataset-provider", "conversations", "--tokenizer", str(tokenizer), "--device", "cpu",
             "--no-bf16", "--layout", "colocated", "--seq-length", "4096", "--image-mean", "0.5", "--image-std", "0.5",
             "--max-tokens-per-microbatch", "4096", "--global-batch-size", "8",
             "--train-iters", "1"]
    for resample in ("bicubic", "bilinear"):
        config = parse_as(RlRunConfig, [*flags, "--image-resample", resample], DESCRIPTION)
        refused = pytest.raises(ValueError, match="^--image-resample bilinear: vLLM resizes .* bicubic$")
        with refused if resample == "bilinear" else nullcontext():
            validate_rl(config, 1, rank=1)


def test_a_processor_with_other_grids_than_the_model_is_refused(tmp_path: Path) -> None:
    config = parse(FLAGS)
    own = [[int(side) for side in grid.split("x")] for grid in GRIDS]
    transformers.LlavaNextImageProcessor(size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=own
                                         ).save_pretrained(tmp_path)
    found = PROVIDER.image_processing(config.model_family, str(tmp_path))
    assert found is not None and (found.tiling, found.resample) == ("anyres", "bicubic")
    assert PROVIDER.write_image_processing(config.model_family, tmp_path, found) == ""
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    published = written | {"aspect_ratio_setting": "anyres"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))
    assert PROVIDER.image_processing(config.model_family, str(tmp_path)) == found
    transformers.LlavaNextImageProcessor(size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=own[:2]
                                         ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="image_grid_pinpoints = .* is not supported; supported: .* as in config.json"):
        PROVIDER.image_processing(config.model_family, str(tmp_path))
    # An export describes the grids of training.
    assert PROVIDER.write_image_processing(config.model_family, tmp_path, found) == ""
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path).image_grid_pinpoints == own


def test_the_dry_run_counts_tiles_and_joined_tokens() -> None:
    config = parse([*FLAGS, "--dataset-provider", "mock", "--device", "cpu", "--no-bf16", "--seq-length", "64",
                    "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1"])
    report = dry_run_report(config, validate(config, 2), model_provider("llava_next"))
    assert "for an image of 512x512 in 5 tiles" in report
    assert "(one 512x512 image per sample = 24 tokens" in report
