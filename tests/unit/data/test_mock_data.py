"""The mock data set: uneven, endless, a function of (seed, split, index)."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from data.mock import Config, provider
from mimo.protocols import Lane, Sample, TokenSpec, VideoSize

TOKENS = TokenSpec(vocab_size=16, image_token_id=9, image_size=8, num_channels=2)


def read(config: Config, count: int, *, module="vision", split="train", seed=5, tokens=TOKENS) -> list[Sample]:
    return list(islice(provider.stream(config, tokens, Lane(module, 0, 1, seed, split)), count))


def test_samples_hold_what_they_declare():
    samples = read(Config(), 300)
    for sample in samples:
        assert sample.tokens.dtype == np.int64
        assert (sample.tokens == 9).sum() == len(sample.image_sizes) == len(sample.images)
        assert not sample.target_mask[sample.tokens == 9].any()
        assert sample.target_mask.any()
        assert all(image.shape == (2, 8, 8) and image.dtype == np.float32 for image in sample.images)
        assert 8 <= (sample.tokens != 9).sum() <= 32
    assert {int(token) for sample in samples for token in sample.tokens} == set(range(1, 16))
    assert {len(sample.image_sizes) for sample in samples} == {0, 1, 2, 3}
    assert len({len(sample.tokens) for sample in samples}) > 15
    assert 0.15 < sum(not sample.image_sizes for sample in samples) / 300 < 0.35


def test_a_sample_is_a_function_of_seed_split_and_index():
    first, again = read(Config(), 20), read(Config(), 20)
    for one, two in zip(first, again, strict=True):
        assert one.key == two.key
        assert np.array_equal(one.tokens, two.tokens)
        assert all(np.array_equal(a, b) for a, b in zip(one.images, two.images, strict=True))
    tokens = [sample.tokens.tolist() for sample in first]
    assert tokens != [sample.tokens.tolist() for sample in read(Config(), 20, seed=6)]
    assert tokens != [sample.tokens.tolist() for sample in read(Config(), 20, split="valid")]


def test_the_language_side_has_the_same_tokens_and_no_pixels():
    for text, image in zip(read(Config(), 20, module="language"), read(Config(), 20), strict=True):
        assert text.images is None
        assert np.array_equal(text.tokens, image.tokens)
        assert text.image_sizes == image.image_sizes


def test_numbers_and_areas_of_images_have_the_spread_that_is_asked_for():
    counts = [len(sample.image_sizes) for sample in read(
        Config(mock_text_only_fraction=0, mock_images_max=40, mock_images_mean=5, mock_images_cv=0.7), 2000,
        module="language")]
    assert 1 <= min(counts) and max(counts) <= 40
    assert abs(np.mean(counts) - 5) < 0.3 and abs(np.std(counts) / np.mean(counts) - 0.7) < 0.08
    same = Config(mock_text_only_fraction=0, mock_images_max=9, mock_images_mean=5)
    assert {len(sample.image_sizes) for sample in read(same, 50)} == {5}
    free = replace(TOKENS, image_size=0, patch_size=2, size_multiple=4)
    sizes = np.array([size for sample in read(
        Config(mock_text_only_fraction=0, mock_image_size=64, mock_image_size_cv=0.7), 1500, tokens=free,
        module="language") for size in sample.image_sizes])
    assert (sizes % 4 == 0).all() and (sizes >= 4).all()
    areas, shapes = sizes.prod(axis=1), sizes[:, 0] / sizes[:, 1]
    assert abs(areas.mean() / 64**2 - 1) < 0.1 and 0.5 < areas.std() / areas.mean() < 0.75
    assert shapes.min() < 0.6 and shapes.max() > 1.6
    (sample, *_) = [sample for sample in read(Config(mock_image_size_cv=0.7), 20, tokens=free) if sample.image_sizes]
    assert [image.shape[1:] for image in sample.images] == sample.image_sizes


def test_rows_are_packed_with_samples_until_one_does_not_fit():
    free = replace(TOKENS, image_size=0, patch_size=2, size_multiple=4)
    config = Config(mock_packed_length=300, mock_image_size=16, mock_image_size_cv=0.7, mock_images_max=2)
    rows, text = read(config, 60, tokens=free), read(config, 60, tokens=free, module="language")
    filled = []
    for row, same in zip(rows, text, strict=True):
        assert sum(row.lengths) == len(row.tokens) == len(row.target_mask)
        assert (row.tokens == 9).sum() == len(row.image_sizes) == len(row.images)
        assert len(row.lengths) == len(row.key.split()) == len(set(row.key.split()))
        filled.append(len(row.tokens) + sum(height * width // 16 - 1 for height, width in row.image_sizes))
        # The side without pixels has the same samples.
        assert same.images is None and same.lengths == row.lengths and same.image_sizes == row.image_sizes
        assert np.array_equal(same.tokens, row.tokens)
    assert max(filled) <= 300 and np.mean(filled) > 240 and len({len(row.lengths) for row in rows}) > 3
    for multiple in (4, 16):
        lane = Lane("language", 0, 1, 5, sequence_multiple=multiple)
        for row in islice(provider.stream(config, free, lane), 60):
            sizes = iter(row.image_sizes)
            parts = np.split(row.tokens, np.cumsum(row.lengths)[:-1])
            padded = [len(part) + sum(height * width // 16 - 1 for height, width in islice(sizes, (part == 9).sum()))
                      for part in parts]
            assert sum(-(-length // multiple) * multiple for length in padded) <= 300 or len(parts) == 1
    words = Config(mock_packed_length=64)
    assert all(sum(row.lengths) <= 64 and len(row.lengths) > 1 for row in read(
        words, 20, tokens=replace(TOKENS, image_token_id=-1)))


def test_sizes_and_ends():
    (sample,) = read(Config(mock_text_only_fraction=0, mock_image_size=24), 1, tokens=replace(TOKENS, image_size=0))
    assert set(sample.image_sizes) == {(24, 24)}
    (wide,) = read(Config(mock_text_only_fraction=0), 1, tokens=replace(TOKENS, image_width=20))
    assert set(wide.image_sizes) == {(8, 20)} and {image.shape for image in wide.images} == {(2, 8, 20)}
    assert not any(sample.image_sizes for sample in read(Config(mock_images_max=0), 20))
    assert provider.num_samples(Config(), "train") is provider.num_samples(Config(), "valid") is None
    assert provider.decode(Config(), [4, 9]) == "4 9"


FREE = replace(TOKENS, image_size=0, patch_size=4, size_multiple=4, temporal_patch_size=2, video_token_id=3)


def test_images_are_replaced_by_videos():
    config = Config(mock_video_fraction=0.5, mock_image_size_cv=0.7, mock_video_frames=7)
    whole, cut = read(config, 200, tokens=FREE), read(config, 200, tokens=replace(FREE, placeholder_frames=2))
    for samples in (whole, cut):
        for sample in samples:
            videos = [isinstance(size, VideoSize) for size in sample.image_sizes]
            assert (sample.tokens[np.isin(sample.tokens, (3, 9))] == 3).tolist() == videos
            for size, pixels in zip(sample.image_sizes, sample.images, strict=True):
                assert pixels.shape == (*size[2:3], 2, *size[:2])
        assert {int(token) for sample in samples for token in sample.tokens} == set(range(1, 16))
    frames = [[size.frames for sample in samples for size in sample.image_sizes if isinstance(size, VideoSize)]
              for samples in (whole, cut)]
    assert set(frames[0]) == {2, 4, 6} and set(frames[1]) == {2} and sum(frames[0]) == sum(frames[1])
    (text, *_) = read(config, 1, tokens=FREE, module="language")
    assert text.images is None and text.image_sizes == whole[0].image_sizes


@pytest.mark.parametrize(("config", "tokens", "message"), [
    (Config(mock_min_length=1), TOKENS, "--mock-min-length 1"),
    (Config(mock_min_length=9, mock_max_length=8), TOKENS, "--mock-min-length 9 --mock-max-length 8"),
    (Config(mock_images_max=-1), TOKENS, "--mock-images-max -1"),
    (Config(mock_images_cv=0.5), TOKENS, "--mock-images-cv 0.5 needs --mock-images-mean"),
    (Config(mock_images_mean=4), TOKENS, "--mock-images-mean 4: must be from 1 to --mock-images-max 3"),
    (Config(mock_image_size_cv=-1), TOKENS, "--mock-image-size-cv -1"),
    (Config(mock_image_size_cv=0.5), TOKENS, "--mock-image-size-cv 0.5: the encoder takes images of one size, 8x8"),
    (Config(mock_text_only_fraction=2), TOKENS, "--mock-text-only-fraction 2"),
    (Config(mock_image_size=0), replace(TOKENS, image_size=0), "--mock-image-size 0"),
    (Config(), replace(TOKENS, vocab_size=2), "--vocab-size 2"),
    (Config(mock_video_fraction=0.5), TOKENS, "--mock-video-fraction 0.5: the model takes no videos"),
    (Config(mock_video_fraction=2), FREE, "--mock-video-fraction 2: must be between 0 and 1"),
    (Config(mock_video_fraction=1), replace(FREE, video_token_id=16),
     "--mock-video-fraction 1: --video-token-id 16 is not below --vocab-size 16"),
    (Config(mock_video_fraction=1, mock_video_frames=1), FREE, "--mock-video-frames 1: must be at least"),
    (Config(mock_packed_length=99), TOKENS, "--mock-packed-length 99: the tokens of an image are known only for"),
    (Config(mock_packed_length=99), replace(TOKENS, image_size=0, patch_size=4, size_multiple=4),
     "--mock-packed-length 99: the largest sample may have 224 tokens"),
    (Config(mock_packed_length=31, mock_images_max=0), TOKENS, "--mock-packed-length 31: the largest sample"),
])
def test_impossible_values_are_refused_with_their_flag(config, tokens, message):
    with pytest.raises(ValueError, match=message):
        read(config, 1, tokens=tokens)
