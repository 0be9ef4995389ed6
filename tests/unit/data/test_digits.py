"""The digits data set: split, determinism, samples, messages."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from data import digits
from data.digits import BOS, EOS, FIRST_DIGIT, NUM_WORDS, WORDS, Config, provider
from mimo.protocols import Lane, Sample, TokenSpec

TOKENS = TokenSpec(vocab_size=64, image_token_id=3, image_size=16, num_channels=3)


def read(
    config: Config, count: int, *, module="vision", split="train", seed=7, lane=0, lanes=1, tokens=TOKENS
) -> list[Sample]:
    return list(islice(provider.stream(config, tokens, Lane(module, lane, lanes, seed, split)), count))


def answer(sample: Sample) -> list[int]:
    return sample.tokens[sample.target_mask].tolist()


def scan_images(scans: np.ndarray) -> set[bytes]:
    """Return the unaugmented images of these scans."""
    pixels, _ = digits.load_scans()
    return {digits.draw([pixels[scan]], 1, (16, 16), 3).tobytes() for scan in scans}


def test_the_split_is_by_scan_stratified_and_complete():
    train, valid = digits.split_scans(0.15)
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 1797
    _, labels = digits.load_scans()
    for digit in range(10):
        share = (labels[valid] == digit).sum() / (labels == digit).sum()
        assert share == pytest.approx(0.15, abs=0.005)


def test_a_larger_held_out_share_contains_the_smaller_one():
    assert set(digits.split_scans(0.1)[1]) < set(digits.split_scans(0.2)[1])


@pytest.mark.parametrize("seed", [1, 2])
def test_train_images_are_train_scans_and_validation_images_are_held_out_scans(seed):
    config = Config(digits_augment=False)
    train, valid = (scan_images(scans) for scans in digits.split_scans(config.digits_valid_fraction))
    assert not train & valid
    shown = {image.tobytes() for sample in read(config, 300, seed=seed) for image in sample.images}
    assert len(shown) > 300
    assert shown <= train
    count = provider.num_samples(config, "valid")
    held_out = [image.tobytes() for sample in read(config, count, split="valid", seed=seed) for image in sample.images]
    assert set(held_out) == valid
    assert len(held_out) - len(valid) < config.digits_max


def test_validation_is_finite_wraps_and_ignores_the_seed():
    count = provider.num_samples(Config(), "valid")
    first = read(Config(), 2 * count, split="valid", seed=1)
    other = read(Config(), count, split="valid", seed=2)
    assert len({sample.key for sample in first}) == count
    for again, sample, reseeded in zip(first[count:], first[:count], other, strict=True):
        assert sample.key == again.key == reseeded.key
        assert sample.tokens.tolist() == again.tokens.tolist() == reseeded.tokens.tolist()
        assert all(np.array_equal(one, two) for one, two in zip(sample.images, reseeded.images, strict=True))
    assert provider.num_samples(Config(), "train") is None


def test_a_train_sample_is_a_function_of_seed_and_index():
    whole = read(Config(), 12)
    for lane in range(3):
        for sample, expected in zip(read(Config(), 4, lane=lane, lanes=3), whole[lane::3], strict=True):
            assert sample.key == expected.key
            assert np.array_equal(sample.tokens, expected.tokens)
            assert all(np.array_equal(one, two) for one, two in zip(sample.images, expected.images, strict=True))
    assert [sample.tokens.tolist() for sample in read(Config(), 12, seed=8)] != [s.tokens.tolist() for s in whole]


def test_both_sides_see_the_same_sample_and_only_the_encoder_side_has_pixels():
    for text, image in zip(read(Config(), 50, module="language"), read(Config(), 50), strict=True):
        assert text.images is None
        assert text.key == image.key
        assert np.array_equal(text.tokens, image.tokens)
        assert text.image_sizes == image.image_sizes
        assert [picture.shape for picture in image.images] == [(3, *size) for size in text.image_sizes]


def test_tokens_of_a_sample_with_images():
    sample = read(Config(digits_text_only_fraction=0, digits_min=3, digits_max=3), 1)[0]
    number = answer(sample)[:-1]
    prompt = [BOS, 3, 3, 3, WORDS["read"], WORDS["the"], WORDS["number"]]
    assert sample.tokens.tolist() == [*prompt, *number, EOS]
    assert answer(sample) == [*number, EOS]
    assert all(FIRST_DIGIT <= token < FIRST_DIGIT + 10 for token in number)
    assert sample.key == "digits/train/000000"


def test_the_images_show_the_digits_of_the_answer():
    pixels, labels = digits.load_scans()
    digit_of = {digits.draw([pixels[scan]], 1, (16, 16), 3).tobytes(): labels[scan] for scan in range(1797)}
    for sample in read(Config(digits_augment=False, digits_text_only_fraction=0), 30):
        shown = [FIRST_DIGIT + digit_of[image.tobytes()] for image in sample.images]
        assert [*shown, EOS] == answer(sample)


def test_a_text_only_sample_names_the_digits_it_asks_for():
    for sample in read(Config(digits_text_only_fraction=1), 20):
        number = [token - FIRST_DIGIT for token in answer(sample)[:-1]]
        words = [WORDS[digits.NAMES[digit]] for digit in number]
        assert sample.tokens.tolist()[1 : 1 + len(words)] == words
        assert sample.image_sizes == [] == sample.images


def test_the_share_of_text_only_samples():
    samples = read(Config(digits_text_only_fraction=0.3), 1000, module="language")
    assert 0.25 < sum(not sample.image_sizes for sample in samples) / 1000 < 0.35
    held_out = read(Config(digits_text_only_fraction=0.9), 50, module="language", split="valid")
    assert all(sample.image_sizes for sample in held_out)
    held_out = read(Config(digits_text_only_fraction=1), 50, module="language", split="valid")
    assert not any(sample.image_sizes for sample in held_out)


def test_lengths_cover_the_range():
    lengths = {len(answer(sample)) - 1 for sample in read(Config(digits_min=2), 200, module="language")}
    assert lengths == {2, 3, 4}


def test_augmentation_changes_train_scans_only_and_moves_them_by_a_pixel_at_most():
    rng = np.random.default_rng(0)
    scan = np.zeros((8, 8), np.float32)
    scan[3, 4] = 0.5
    peaks = set()
    for _ in range(200):
        changed = digits.augment(scan, rng)
        row, column = np.unravel_index(changed.argmax(), changed.shape)
        peaks.add((int(row), int(column)))
        assert 0.45 <= changed.max() <= 0.55
    assert peaks == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert digits.augment(np.ones((8, 8), np.float32), rng).max() <= 1
    plain, augmented = Config(digits_augment=False), Config(digits_augment=True)
    pairs = list(zip(read(plain, 20), read(augmented, 20), strict=True))
    assert all(np.array_equal(one.tokens, two.tokens) for one, two in pairs)
    assert any(not np.array_equal(a, b) for one, two in pairs for a, b in zip(one.images, two.images, strict=True))
    held_out = zip(read(plain, 20, split="valid"), read(augmented, 20, split="valid"), strict=True)
    assert all(np.array_equal(a, b) for one, two in held_out for a, b in zip(one.images, two.images, strict=True))


def test_pixels_are_normalised_enlarged_and_repeated():
    scan = np.zeros((8, 8), np.float32)
    scan[2, 5] = 1
    image = digits.draw([scan], 1, (24, 24), 2)
    assert image.shape == (2, 24, 24)
    assert image.dtype == np.float32
    assert np.array_equal(image[0], image[1])
    ink = image[0] * digits.PIXEL_STD + digits.PIXEL_MEAN
    assert ink[6:9, 15:18] == pytest.approx(1, abs=1e-5)
    assert ink.sum() == pytest.approx(9, abs=1e-3)
    pixels, _ = digits.load_scans()
    drawn = np.stack([digits.draw([scan], 1, (8, 8), 1) for scan in pixels])
    assert drawn.mean() == pytest.approx(0, abs=1e-3)
    assert drawn.std() == pytest.approx(1, abs=1e-3)


def test_a_strip_is_one_image_with_the_digits_side_by_side():
    config = Config(digits_strip=True, digits_augment=False, digits_text_only_fraction=0, digits_image_size=16)
    any_size = replace(TOKENS, image_size=0)
    single = replace(config, digits_strip=False)
    blank = np.float32(-digits.PIXEL_MEAN / digits.PIXEL_STD)
    for strip, apart in zip(read(config, 10, tokens=any_size), read(single, 10, tokens=any_size), strict=True):
        assert strip.tokens.tolist().count(3) == 1
        assert strip.image_sizes == [(16, 64)]
        assert answer(strip) == answer(apart)
        (image,) = strip.images
        width = 16 * len(apart.images)
        assert np.array_equal(image[:, :, :width], np.concatenate(apart.images, axis=2))
        assert image[:, :, width:] == pytest.approx(blank)


def test_a_strip_fits_an_encoder_of_one_fixed_size():
    (sample,) = read(Config(digits_strip=True, digits_text_only_fraction=0), 1, tokens=replace(TOKENS, image_size=32))
    assert sample.image_sizes == [(32, 32)]
    assert sample.images[0].shape == (3, 32, 32)


def test_images_of_one_fixed_size_need_not_be_square():
    any_size, wide = replace(TOKENS, image_size=0), replace(TOKENS, image_size=16, image_width=64)
    config = Config(digits_strip=True, digits_text_only_fraction=0, digits_image_size=16)
    for free, fixed in zip(read(config, 5, tokens=any_size), read(config, 5, tokens=wide), strict=True):
        assert fixed.image_sizes == [(16, 64)] and np.array_equal(fixed.images[0], free.images[0])
    single = replace(config, digits_strip=False)
    for free, fixed in zip(read(single, 5, tokens=any_size), read(single, 5, tokens=wide), strict=True):
        for apart, padded in zip(free.images, fixed.images, strict=True):
            assert padded.shape == (3, 16, 64) and np.array_equal(padded[:, :, :16], apart)


def test_decode():
    (sample,) = read(Config(digits_text_only_fraction=0, digits_min=2, digits_max=2), 1)
    number = "".join(str(token - FIRST_DIGIT) for token in answer(sample)[:-1])
    assert provider.decode(Config(), answer(sample)) == number
    assert provider.decode(Config(), sample.tokens.tolist()) == f"<image> <image> read the number {number}"
    assert provider.decode(Config(), [7, EOS, 8]) == "3"
    assert provider.decode(Config(), [60, 7]) == "<60> 3"


@pytest.mark.parametrize(("config", "tokens", "message"), [
    (Config(digits_min=0), TOKENS, "--digits-min 0"),
    (Config(digits_min=3, digits_max=2), TOKENS, "--digits-min 3 --digits-max 2"),
    (Config(digits_text_only_fraction=1.5), TOKENS, "--digits-text-only-fraction 1.5"),
    (Config(digits_valid_fraction=1.0), TOKENS, "--digits-valid-fraction 1.0"),
    (Config(digits_valid_fraction=0.0), TOKENS, "no scan is held out"),
    (Config(), replace(TOKENS, vocab_size=NUM_WORDS - 1), "--vocab-size 26: .* 27 token ids"),
    (Config(), replace(TOKENS, image_token_id=5), "--image-token-id 5: .*free: 3 or 27 to 63"),
    (Config(), replace(TOKENS, image_token_id=64), "--image-token-id 64"),
    (Config(), replace(TOKENS, image_size=20), "--vision-image-size 20: must be a multiple of 8"),
    (Config(digits_image_size=12), replace(TOKENS, image_size=0), "--digits-image-size 12: must be"),
    (Config(digits_strip=True), TOKENS, "--digits-strip with --digits-max 4 .* at least 32, got 16"),
    (Config(), replace(TOKENS, image_width=20), "--vision-image-width 20: must be a multiple of 8"),
    (Config(digits_strip=True), replace(TOKENS, image_size=32, image_width=24),
     "needs --vision-image-width of at least 32, got 24"),
])
def test_impossible_values_are_refused_with_their_flag(config, tokens, message):
    with pytest.raises(ValueError, match=message):
        read(config, 1, split="valid", tokens=tokens)


def test_another_free_image_token_id_is_used():
    (sample,) = read(Config(digits_text_only_fraction=0), 1, tokens=replace(TOKENS, image_token_id=40))
    assert sample.tokens.tolist().count(40) == len(sample.image_sizes) > 0


def test_a_share_of_train_answers_is_in_words():
    plain, mixed = read(Config(), 200), read(Config(digits_words_fraction=0.6), 200)
    in_words = with_images = 0
    for before, after in zip(plain, mixed, strict=True):
        assert (before.tokens[~before.target_mask] == after.tokens[~after.target_mask]).all()
        if answer(before) != answer(after):
            names = [WORDS[digits.NAMES[token - FIRST_DIGIT]] for token in answer(before)[:-1]]
            assert answer(after) == [*names, EOS]
            in_words += 1
            with_images += bool(after.image_sizes)
    # 0.6 of all, and of those with images, seven in ten.
    assert 100 < in_words < 140 and 68 < with_images < 100
    assert [answer(sample) for sample in read(Config(digits_words_fraction=1.0), 5, split="valid")] == [
        answer(sample) for sample in read(Config(), 5, split="valid")]
    with pytest.raises(ValueError, match="--digits-words-fraction 1.5: must be between 0 and 1"):
        read(Config(digits_words_fraction=1.5), 1)
