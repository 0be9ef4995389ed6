"""Positions of three axes against transformers, and against their definition where it departs from transformers."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mimo.data.batch import TextBatch
from mimo.data.collate import Placeholders, collate_text, expand_images
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ModelProvider, Sample, VideoSize
from mimo.registry import model_provider
from mimo.visual import ImageSize, TokenGrid, multimodal_positions

IMAGE = 9
VIDEO = 8
UNIT = 28


def token_grid(module: str, height: int, width: int) -> TokenGrid:
    return TokenGrid(height // UNIT, width // UNIT)


def sample(places: list[int], sizes: list[tuple[int, int]], length: int, lengths: tuple[int, ...] = ()) -> Sample:
    """A sample of `length` text tokens with an image before each text token of `places`."""
    tokens = np.insert(np.ones(length, np.int64), places, IMAGE)
    return Sample("key", tokens, np.zeros(len(tokens), np.bool_), sizes, lengths=lengths)


def collated(*samples: Sample, seq_length: int = 64) -> TextBatch:
    return collate_text(
        samples, seq_length=seq_length, vocab_size=16, pad_token_id=0, images=Placeholders(
            {"vision": IMAGE}, lambda *image: token_grid(*image).size, token_grid=token_grid))


def transformers_positions(tokens: torch.Tensor, sizes: list[tuple[int, int]]) -> torch.Tensor:
    """Positions of one sample's tokens by transformers, `[3, tokens]`."""
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    kind = modeling.Qwen2_5_VLModel
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)),
        get_vision_position_ids=lambda *args, **kwargs: kind.get_vision_position_ids(None, *args, **kwargs))
    grids = torch.tensor([[1, 2 * height // UNIT, 2 * width // UNIT] for height, width in sizes])
    ids = tokens[None]
    return kind.get_rope_index(model, ids, (ids == IMAGE).int(), grids)[0][:, 0]


def test_positions_of_images_are_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        length, count = int(rng.integers(4, 12)), int(rng.integers(0, 4))
        # transformers cannot tell images apart that follow each other.
        places = sorted(rng.choice(length + 1, count, replace=False).tolist())
        sizes = [(UNIT * int(rng.integers(1, 5)), UNIT * int(rng.integers(1, 5))) for _ in range(count)]
        batch = collated(sample(places, sizes, length))
        assert batch.position_ids.shape == (3, 1, 64)
        expected = transformers_positions(batch.input_ids[0, :batch.num_tokens], sizes)
        assert torch.equal(batch.position_ids[:, 0, :batch.num_tokens], expected)


def test_every_sample_of_a_pack_has_the_positions_it_has_alone() -> None:
    parts = [sample([0], [(56, 84)], 3), sample([], [], 4), sample([1, 1], [(28, 28), (84, 28)], 2)]
    pack = Sample("pack", np.concatenate([part.tokens for part in parts]), np.zeros(13, np.bool_)[:12],
                  [size for part in parts for size in part.image_sizes], lengths=tuple(len(p.tokens) for p in parts))
    packed = collated(pack)
    assert packed.packed is not None
    starts = packed.packed.cu_seqlens.tolist()
    for part, (start, stop) in zip(parts, itertools.pairwise(starts[:-1]), strict=True):
        alone = collated(part)
        assert torch.equal(packed.position_ids[:, 0, start:stop], alone.position_ids[:, 0, :stop - start])
    padding = packed.position_ids[:, 0, starts[-2]:]
    assert torch.equal(padding, torch.arange(padding.shape[1]).expand(3, -1))


def test_rows_of_a_microbatch_have_positions_of_their_own() -> None:
    samples = [sample([2], [(56, 56)], 4), sample([0, 3], [(28, 84), (56, 28)], 5)]
    batch = collated(*samples)
    assert batch.position_ids.shape == (3, 2, 64)
    for row, each in enumerate(samples):
        assert torch.equal(batch.position_ids[:, row], collated(each).position_ids[:, 0])


def videos_of(provider: ModelProvider, config: Any) -> Placeholders:
    """How a family takes images and videos."""
    return Placeholders.of(provider, config, Layout(
        "disjoint", 2, (GridSpec("vision"),), GridSpec(LANGUAGE, 1)))


def draw_row(rng: np.random.Generator, cut: bool) -> tuple[list[int], list[ImageSize]]:
    """Tokens with placeholders, text between any two, and the sizes of images and videos."""
    tokens, sizes = [1], []
    for _ in range(int(rng.integers(1, 4))):
        height, width = (UNIT * int(side) for side in rng.integers(1, 5, 2))
        patches = int(rng.integers(1, 7))
        seconds = float(rng.choice([0.25, 0.5, 1 / 3, 0.999, 1.0, 2.0]))
        if rng.random() < 0.3:
            added: list[ImageSize] = [(height, width)]
        elif cut:
            added = [VideoSize(height, width, 2)] * patches
        else:
            added = [VideoSize(height, width, 2 * patches, seconds)]
        for size in added:
            tokens += [VIDEO if isinstance(size, VideoSize) else IMAGE, *[1] * int(rng.integers(1, 3))]
        sizes += added
    return tokens, sizes


def engine_positions(provider: ModelProvider, config: Any, num_tokens: int, starts: list[int], sizes: list[ImageSize]
                     ) -> torch.Tensor:
    """Positions of one sample's tokens by vLLM, `[3, tokens]`."""
    module = pytest.importorskip("vllm.model_executor.models.qwen2_5_vl")
    kind = module.Qwen2_5_VLForConditionalGeneration
    features = []
    for start, size in zip(starts, sizes, strict=True):
        video = isinstance(size, VideoSize)
        grid = torch.tensor([size.frames // 2 if isinstance(size, VideoSize) else 1, *(2 * side // UNIT for side in
                                                                                     size[:2])])
        data = {f"{'video' if video else 'image'}_grid_thw": SimpleNamespace(data=grid)}
        if isinstance(size, VideoSize):
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(2 * size.frame_seconds))
        features.append(SimpleNamespace(mm_position=SimpleNamespace(offset=start), data=data,
                                        modality="video" if video else "image"))
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(
        spatial_merge_size=2, tokens_per_second=config.vision_tokens_per_second)))
    model.iter_mm_grid_thw = partial(kind.iter_mm_grid_thw, model)
    return kind.get_mrope_input_positions(model, [0] * num_tokens, features)[0]


def theirs_with_videos(family: str, tokens: torch.Tensor, sizes: list[ImageSize], tokens_per_second: int
                       ) -> torch.Tensor:
    """Positions of one sample's tokens by transformers, `[3, tokens]`."""
    name = {"qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}[family]
    kind = vars(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"))[name]
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(
            spatial_merge_size=2, tokens_per_second=tokens_per_second)),
        get_vision_position_ids=lambda *args, **kwargs: kind.get_vision_position_ids(None, *args, **kwargs))
    grids = [[size.frames // 2 if isinstance(size, VideoSize) else 1, *(2 * side // UNIT for side in size[:2])]
             for size in sizes]
    given = {}
    for key, video in (("image_grid_thw", False), ("video_grid_thw", True)):
        chosen = [grid for grid, size in zip(grids, sizes, strict=True) if isinstance(size, VideoSize) == video]
        given[key] = torch.tensor(chosen) if chosen else None
    if family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor(
            [2 * size.frame_seconds for size in sizes if isinstance(size, VideoSize)])
    ids = tokens[None]
    return kind.get_rope_index(model, ids, (ids == IMAGE).int() + 2 * (ids == VIDEO).int(), **given)[0][:, 0]


def video_row(family: str, rng: np.random.Generator) -> tuple[Any, TextBatch, list[int], list[ImageSize]]:
    """A family's small configuration with a row of images and videos, where they start, and their sizes."""
    provider = model_provider(family)
    config = provider.Config(vision_patch_size=14, image_token_id=IMAGE, video_token_id=VIDEO, vocab_size=16)
    tokens, sizes = draw_row(rng, family == "qwen3_vl")
    row = Sample("key", np.array(tokens), np.zeros(len(tokens), np.bool_), sizes)
    images = videos_of(provider, config)
    batch = collate_text([row], images=images, seq_length=2048, vocab_size=16, pad_token_id=0)
    return config, batch, expand_images(row, images).starts.tolist(), sizes


@pytest.mark.slow
def test_positions_of_videos_are_those_of_vllm_and_mostly_of_transformers() -> None:
    rng, agree, provider = np.random.default_rng(0), 0, model_provider("qwen2_5_vl")
    for _ in range(100):
        config, batch, starts, sizes = video_row("qwen2_5_vl", rng)
        ours = batch.position_ids[:, 0, :batch.num_tokens]
        assert torch.equal(ours, engine_positions(provider, config, batch.num_tokens, starts, sizes))
        theirs = theirs_with_videos("qwen2_5_vl", batch.input_ids[0, :batch.num_tokens], sizes,
                                    config.vision_tokens_per_second)
        same = all(not isinstance(size, VideoSize) or _is_short(size, config.vision_tokens_per_second)
                   for size in sizes)
        assert same == torch.equal(ours, theirs)
        agree += same
    assert 20 < agree < 80


def _is_short(size: VideoSize, tokens_per_second: int) -> bool:
    """Whether no later position of time lies past those of rows and columns, after which transformers goes on."""
    last = int((size.frames // 2 - 1) * tokens_per_second * float(np.float32(2 * size.frame_seconds)))
    return last < max(size.height, size.width) // UNIT


def test_positions_of_temporal_patches_are_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        _, batch, _, sizes = video_row("qwen3_vl", rng)
        expected = theirs_with_videos("qwen3_vl", batch.input_ids[0, :batch.num_tokens], sizes, 1)
        assert torch.equal(batch.position_ids[:, 0, :batch.num_tokens], expected)


def test_text_behind_a_video_follows_its_last_frame() -> None:
    row = multimodal_positions([14], [(3, TokenGrid(2, 2, frames=2, frame_step=2.5))])
    assert row[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5, 5, 5, 5, 6, 7, 8]
    assert row[1].tolist() == [0, 1, 2, 3, 3, 4, 4, 3, 3, 4, 4, 6, 7, 8]
    assert row[2].tolist() == [0, 1, 2, 3, 4, 3, 4, 3, 4, 3, 4, 6, 7, 8]


def test_text_without_an_encoder_has_one_position_on_all_axes() -> None:
    text = collate_text([sample([], [], 5)], images=Placeholders({}, lambda *image: 1, token_grid=token_grid),
                        seq_length=8, vocab_size=16, pad_token_id=0)
    assert torch.equal(text.position_ids[:, 0], torch.arange(8).expand(3, -1))
