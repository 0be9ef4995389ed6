"""Images of prompts: what the engine is asked, how tokens are counted and cut, and pixels equal on both sides."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from data import image_tiling
from data.energon.provider import Config as energon_flags
from mimo.config.rl_run import RlRunConfig, validate_rl
from mimo.data.encoder_inputs import PatchOrder, patchify
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, VideoSize
from mimo.registry import model_provider
from mimo.rl.images import ImageTokens, as_request, cut, needs_pixels
from mimo.rl.rollouts import Completion
from mimo.visual import Normalisation
from providers import qwen2_5_vl
from tests.support import vlm_updates
from tests.support.vlm_updates import IMAGE_TOKEN, LENGTHS, SIDE, TOKENS_OF_IMAGE, PictureSet, completions

LAYOUT = Layout("disjoint", 3, (GridSpec("vision", pp=2),), GridSpec(LANGUAGE, offset=2))


@pytest.fixture(scope="module")
def config() -> RlRunConfig:
    return vlm_updates.parsed(RlRunConfig().rl, ("--encoder-dp", "4", "--llm-dp", "2"))


@pytest.fixture(scope="module")
def images(config: RlRunConfig) -> ImageTokens:
    return ImageTokens.of(model_provider("llava"), config.model_family, LAYOUT)


def test_encoder_ranks_share_a_lane_in_as_many_parts(config):
    assert config.lane_rows == 2 and dataclasses.replace(config, layout=type(config.layout)()).lane_rows == 1
    assert [[*part] for part in cut(completions(0)[:5], 2)] == [completions(0)[:2], completions(0)[2:5]]
    assert [len(part) for part in cut(completions(0)[:1], 3)] == [0, 0, 1]
    assert [needs_pixels(LAYOUT, rank) for rank in range(3)] == [True, False, False]


def test_the_engine_is_asked_with_one_placeholder_an_image():
    prompt = PictureSet().prompt(2)
    request = as_request(prompt)
    assert request["prompt_token_ids"] == [7, IMAGE_TOKEN, IMAGE_TOKEN]
    for image, picture in zip(request["multi_modal_data"]["image"], prompt.pictures(), strict=True):
        assert (np.asarray(image) == picture).all()
    assert as_request(PictureSet().prompt(1)) == {"prompt_token_ids": [5, 6]}
    tiles = dataclasses.replace(prompt, pictures=lambda: [np.stack([picture] * 3) for picture in prompt.pictures()])
    with pytest.raises(ValueError, match=r"prompt .* has tiles of images without the whole images \(Prompt.originals"):
        as_request(tiles)


def test_images_count_as_the_tokens_that_they_become(images):
    assert [images.count(PictureSet().prompt(index)) for index in range(4)] == [4, 0, 8, 4]
    own = completions(0)
    assert [each.length for each in own] == [
        count + len(each.prompt_ids) + (TOKENS_OF_IMAGE - 1) * len(each.image_sizes)
        for count, each in zip(LENGTHS, own, strict=True)]
    expanded = [images.expanded(each) for each in own[4:7]]
    assert [each.tokens.tolist() for each in expanded] == [[7, *[IMAGE_TOKEN] * 8]] * 2 + [[11, *[IMAGE_TOKEN] * 4, 12]]
    # In a row the sequences have their completions between them.
    places = images.placeholders(expanded, [0, 30, 60])["vision"]
    assert places.tolist() == [*range(1, 9), *range(31, 39), *range(61, 65)]


def test_parts_of_a_microbatch_have_keys_and_counts_of_their_own(images):
    own = completions(0)
    assert images.text_parts(own[:5], 2) == {
        "keys": ("prompt 0#0 prompt 0#1", "prompt 1#0 prompt 1#1 prompt 2#0"),
        "token_counts": {"vision": (8, 8)}, "image_lengths": {"vision": (4,) * 4}, "tile_lengths": {}}
    assert images.text_parts(own[:1], 2) == {"keys": ("", "prompt 0#0"), "token_counts": {"vision": (0, 4)},
                                             "image_lengths": {"vision": (4,)}, "tile_lengths": {}}


@pytest.mark.parametrize(("changes", "expected"), [
    ({"image_sizes": ()}, "prompt 0: 1 image placeholder .* but 0 images"),
    ({"image_sizes": ((8, 8),)}, "prompt 0: image 0 of 8x8 pixels: .* does not fit --vision-image-size 16"),
    ({"image_sizes": (VideoSize(16, 16, 2),)}, "prompt 0: video 0 of 2 frames .* the model takes images and no videos"),
    # A word of the text with the id of the image token would be an image for the engine, too.
    ({"token_ids": (IMAGE_TOKEN, 4, IMAGE_TOKEN)}, "prompt 0: 2 image placeholders .* but 1 image"),
])
def test_images_that_the_model_does_not_take_are_refused_by_prompt(images, changes, expected):
    with pytest.raises(ValueError, match=expected):
        images.count(dataclasses.replace(PictureSet().prompt(0), **changes))


def test_the_engines_processor_makes_the_trainers_pixels(config, tmp_path):
    from transformers import LlavaProcessor

    normalisation = Normalisation((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    model_provider("llava").write_processor(config.model_family, tmp_path, normalisation.mean, normalisation.std)
    processor = LlavaProcessor.from_pretrained(tmp_path)
    assert processor.tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    assert len(processor.tokenizer) == vlm_updates.VOCAB_SIZE
    # All levels of a pixel; and red is not blue.
    picture = np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE, 1).repeat(3, axis=2)
    picture[..., 2] = picture[::-1, :, 2]
    theirs = processor.image_processor(as_request_image(picture), return_tensors="np")["pixel_values"][0]
    assert theirs.shape == (3, SIDE, SIDE)
    assert np.abs(theirs - normalisation.apply(picture)).max() < 1e-6


QWEN = qwen2_5_vl.Config(vocab_size=64, image_token_id=63, video_token_id=62, vision_start_token_id=61,
                         vision_end_token_id=60)


def test_the_engines_processor_of_a_qwen_keeps_the_sizes_of_images(tmp_path):
    from transformers import Qwen2_5_VLProcessor

    normalisation = Normalisation((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    provider = model_provider("qwen2_5_vl")
    provider.write_processor(QWEN, tmp_path, normalisation.mean, normalisation.std)
    processor = Qwen2_5_VLProcessor.from_pretrained(tmp_path)
    assert (processor.image_token_id, processor.video_token_id) == (63, 62) and len(processor.tokenizer) == 64
    for size in ((28, 28), (56, 1400), (1092, 616)):
        picture = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        theirs = processor.image_processor(as_request_image(picture), return_tensors="np")
        assert theirs["image_grid_thw"].tolist() == [[1, size[0] // 14, size[1] // 14]]
        ours = patchify(normalisation.apply(picture), PatchOrder(14, 2, 2))
        assert np.abs(theirs["pixel_values"] - ours).max() < 1e-5
    with pytest.raises(ValueError, match=re.escape("--video-token-id 151656 --vision-start-token-id 61")):
        provider.check_processor(dataclasses.replace(QWEN, video_token_id=151656))


def test_positions_of_packed_completions_are_those_of_each_alone():
    images = ImageTokens.of(model_provider("qwen2_5_vl"), QWEN, LAYOUT)
    prompts = [(5, 63, 6, 63), (7, 8), (63, 9)]
    sizes = [((56, 84), (28, 28)), (), ((84, 28),)]
    own = [Completion(f"c{number}", number, tokens, (1, 2, 3), (0.0,) * 3, "length", 0.0, number, image_sizes,
                      sum(height * width // 784 for height, width in image_sizes))
           for number, (tokens, image_sizes) in enumerate(zip(prompts, sizes, strict=True))]
    total = sum(each.length for each in own)
    rows = [images.expanded(each) for each in own]
    packed = images.positions(own, rows, torch.tensor([0, *np.cumsum([each.length for each in own]), total + 2]))
    assert packed.shape == (3, 1, total + 2)
    assert packed[:, 0, total:].tolist() == [[0, 1]] * 3
    start = 0
    for each, row in zip(own, rows, strict=True):
        alone = images.positions([each], [row], torch.tensor([0, each.length]))
        assert packed[:, 0, start : start + each.length].tolist() == alone[:, 0].tolist()
        start += each.length
    # Text, 2 x 3 tokens, text, an image of one token, and an answer that counts on.
    first = images.positions(own[:1], rows[:1], torch.tensor([0, own[0].length]))
    assert first[1, 0].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7, 8]


def as_request_image(picture: np.ndarray) -> object:
    prompt = dataclasses.replace(PictureSet().prompt(0), pictures=lambda: [picture])
    return as_request(prompt)["multi_modal_data"]["image"][0]


@pytest.mark.parametrize(("flags", "expected"), [
    ("--model-provider mock", "image processors for rollouts exist only for --model-provider llava, llava_next, qwe"),
    ("--vision-num-channels 1", "--vision-num-channels 1: image processors .* take images of 3 channels"),
    ("--no-vision-class-token", "CLIP has --vision-class-token and --vision-pre-layernorm, SigLIP"),
])
def test_models_that_the_engine_cannot_be_told_of_are_refused(flags, expected):
    with pytest.raises(ValueError, match=expected):
        validate_rl(vlm_updates.parsed(RlRunConfig().rl, (
            "--layout", "colocated", "--max-completion-tokens", "8", "--seq-length", "64", *flags.split())), 1)


NEMOTRON = model_provider("nemotron-moe-vlm-tiny")


@pytest.mark.parametrize(("changes", "expected"), [
    ({"vision_pixel_shuffle": 1}, "--vision-pixel-shuffle 1: vLLM's NemotronH_Nano_VL_V2 has 2 built in"),
    ({"vision_cpe_augmentation": True}, "--vision-cpe-augmentation: the trainer would draw random crops"),
    ({"vision_max_image_size": 32}, "--vision-image-size 32 equals --vision-max-image-size, so vLLM would cut"),
])
def test_nemotron_models_that_vllm_would_compute_differently_are_refused(changes, expected):
    config = NEMOTRON.Config()
    NEMOTRON.check_processor(config)
    with pytest.raises(ValueError, match=expected):
        NEMOTRON.check_processor(dataclasses.replace(config, **changes))


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_folder_of_a_nemotron_says_how_images_become_pixels(tmp_path, dynamic):
    config = NEMOTRON.Config(vision_dynamic_resolution=dynamic)
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON.hf_config(config)))
    NEMOTRON.write_processor(config, tmp_path, (0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    found = NEMOTRON.image_processing(config, str(tmp_path))
    assert (found.mean, found.std) == ((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    assert (found.tiling, found.min_patches, found.max_patches) == (("dynamic", 4, -1) if dynamic else ("fixed", 0, 0))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # The engine writes these words around an image; a prompt has their tokens itself, if it has them.
    assert tokenizer.encode("<img><image><image></img>", add_special_tokens=False) == [config.image_token_id] * 2


def sizes(count: int) -> list[tuple[int, int]]:
    """Heights and widths of images, from slim ones to large ones."""
    rng = np.random.default_rng(0)
    return [tuple(int(side) for side in np.exp(rng.uniform(np.log(20), np.log(700), 2))) for _ in range(count)]


def pictures_of_any_size(provider: Any, config: Any, count: int) -> Iterator[np.ndarray]:
    """Pictures of images of any size, as a prompt set makes them for a model."""
    processing = dataclasses.replace(provider.image_processing(config), min_patches=4, max_patches=400)
    flags = energon_flags(image_tiling=processing.tiling, image_resample=processing.resample,
                          image_mean=processing.mean, image_std=processing.std, min_patches=processing.min_patches,
                          max_patches=processing.max_patches)
    tiling = image_tiling.tiling_of(flags, provider.token_spec(config))
    rng = np.random.default_rng(1)
    for size in sizes(count):
        (picture,) = image_tiling.tile_pictures(Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)), tiling)
        assert picture.shape[:2] == image_tiling.tile_sizes(*size, tiling)[0]
        yield picture


def test_the_engine_keeps_pictures_of_a_qwen_of_any_size(tmp_path):
    from transformers import Qwen3VLProcessor

    normalisation, provider = Normalisation((0.3, 0.4, 0.5), (0.2, 0.3, 0.4)), model_provider("qwen3_vl")
    config = provider.Config(vocab_size=64, image_token_id=63, video_token_id=62, vision_start_token_id=61,
                             vision_end_token_id=60)
    provider.write_processor(config, tmp_path, normalisation.mean, normalisation.std)
    processor = Qwen3VLProcessor.from_pretrained(tmp_path).image_processor
    for picture in pictures_of_any_size(provider, config, 30):
        theirs = processor(as_request_image(picture), return_tensors="np")
        ours = patchify(normalisation.apply(picture), PatchOrder(16, 2, 2))
        assert theirs["pixel_values"].shape == ours.shape and np.abs(theirs["pixel_values"] - ours).max() < 1e-5
        assert theirs["image_grid_thw"].prod() == 4 * provider.num_image_tokens(config, "vision", *picture.shape[:2])


@pytest.mark.slow
def test_the_engine_keeps_pictures_of_a_nemotron_of_any_size(tmp_path):
    from vllm.transformers_utils.processors.nano_nemotron_vl import NanoNemotronVLProcessor

    from mimo.rollout.vllm_models import NemotronVlConfig

    normalisation, config = Normalisation((0.3, 0.4, 0.5), (0.2, 0.3, 0.4)), NEMOTRON.Config()
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON.hf_config(config)))
    NEMOTRON.write_processor(config, tmp_path, normalisation.mean, normalisation.std)
    processor = NanoNemotronVLProcessor(NemotronVlConfig.from_pretrained(tmp_path),
                                        transformers.AutoTokenizer.from_pretrained(tmp_path), max_model_len=1024)
    for picture in pictures_of_any_size(NEMOTRON, config, 60):
        theirs = processor("<image>", as_request_image(picture))
        assert np.abs(theirs["pixel_values_flat"][0].numpy() - normalisation.apply(picture)).max() < 1e-5
        assert theirs["num_tokens_per_image"] == [NEMOTRON.num_image_tokens(config, "vision", *picture.shape[:2])]
