"""Positions of three axes against transformers, and against their definition where it departs from transformers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mimo.data.batch import TextBatch
from mimo.data.collate import Placeholders, collate_text
from mimo.data.positions import TokenGrid, multimodal_positions
from mimo.protocols import Sample

IMAGE = 9
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


def test_text_behind_a_video_follows_its_last_frame() -> None:
    row = multimodal_positions([14], [(3, TokenGrid(2, 2, frames=2, frame_step=2.5))])
    assert row[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5, 5, 5, 5, 6, 7, 8]
    assert row[1].tolist() == [0, 1, 2, 3, 3, 4, 4, 3, 3, 4, 4, 6, 7, 8]
    assert row[2].tolist() == [0, 1, 2, 3, 4, 3, 4, 3, 4, 3, 4, 6, 7, 8]


def test_text_without_an_encoder_has_one_position_on_all_axes() -> None:
    text = collate_text([sample([], [], 5)], images=Placeholders({}, lambda *image: 1, token_grid=token_grid),
                        seq_length=8, vocab_size=16, pad_token_id=0)
    assert torch.equal(text.position_ids[:, 0], torch.arange(8).expand(3, -1))
