"""The mock data set: uneven, endless, a function of (seed, split, index)."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from data.mock import Config, provider
from mimo.protocols import Lane, Sample, TokenSpec

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


def test_sizes_and_ends():
    (sample,) = read(Config(mock_text_only_fraction=0, mock_image_size=24), 1, tokens=replace(TOKENS, image_size=0))
    assert set(sample.image_sizes) == {(24, 24)}
    (wide,) = read(Config(mock_text_only_fraction=0), 1, tokens=replace(TOKENS, image_width=20))
    assert set(wide.image_sizes) == {(8, 20)} and {image.shape for image in wide.images} == {(2, 8, 20)}
    assert not any(sample.image_sizes for sample in read(Config(mock_images_max=0), 20))
    assert provider.num_samples(Config(), "train") is provider.num_samples(Config(), "valid") is None
    assert provider.decode(Config(), [4, 9]) == "4 9"


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        (Config(mock_min_length=1), TOKENS, "--mock-min-length 1"),
        (Config(mock_min_length=9, mock_max_length=8), TOKENS, "--mock-min-length 9 --mock-max-length 8"),
        (Config(mock_images_max=-1), TOKENS, "--mock-images-max -1"),
        (Config(mock_text_only_fraction=2), TOKENS, "--mock-text-only-fraction 2"),
        (Config(mock_image_size=0), replace(TOKENS, image_size=0), "--mock-image-size 0"),
        (Config(), replace(TOKENS, vocab_size=2), "--vocab-size 2"),
    ],
)
def test_what_cannot_work_is_refused_by_flag(config, tokens, message):
    with pytest.raises(ValueError, match=message):
        read(config, 1, tokens=tokens)
