"""The digits as prompts: the numbers of supervised training without their answers, as 8-bit pictures."""

import numpy as np
import pytest

from data import digits
from data.digits import BOS, EOS, FIRST_DIGIT, WORDS, Config
from data.digits import prompt_provider as provider
from mimo.protocols import Lane, TokenSpec
from mimo.rl.prompts import ImagePromptSet
from mimo.rl.rewards.short_answers import exact_match

TOKENS = TokenSpec(vocab_size=64, image_token_id=3, image_size=16, num_channels=3)


def opened(split="train", seed=7, **flags):
    return provider.open(Config(**flags), TOKENS, split, seed)


def test_a_prompt_asks_for_what_its_pictures_show():
    prompts = opened(digits_augment=False)
    assert isinstance(prompts, ImagePromptSet)
    scans = {np.rint(digits.lay_out([scan], 1, (16, 16)) * 255).astype(np.uint8).tobytes(): int(digit)
             for scan, digit in zip(*digits.load_scans(), strict=True)}
    texts = set()
    for index in range(60):
        prompt = prompts.prompt(index)
        pictures = prompt.pictures()
        assert [picture.shape for picture in pictures] == [(16, 16, 3)] * len(prompt.image_sizes)
        if pictures:
            shown = [scans[picture[..., 0].tobytes()] for picture in pictures]
            assert "".join(map(str, shown)) == prompt.ground_truth and tuple(shown) == prompt.metadata["digits"]
        assert prompt.token_ids.count(3) == len(prompt.image_sizes) and prompt.token_ids[0] == BOS
        texts.add(bool(pictures))
        answer = [FIRST_DIGIT + int(digit) for digit in prompt.ground_truth]
        for end, score in ((EOS, 1), (WORDS["read"], 0)):
            completion = prompts.decode([*answer, end])
            assert exact_match(prompt.text, completion, prompt.ground_truth, prompt.metadata) == score
    assert texts == {False, True}
    strip = opened(digits_strip=True, digits_max=2, digits_text_only_fraction=0.0).prompt(0)
    assert (strip.text, len(strip.pictures())) == ("<image> read the number", 1)


def test_a_prompt_is_a_function_of_seed_split_and_place():
    first, again, other = (opened(seed=seed, digits_text_only_fraction=0.0) for seed in (7, 7, 8))
    for index in (0, 5, 1000):
        ours, theirs = first.prompt(index), again.prompt(index)
        assert (ours.key, ours.token_ids, ours.ground_truth) == (theirs.key, theirs.token_ids, theirs.ground_truth)
        for left, right in zip(ours.pictures(), theirs.pictures(), strict=True):
            assert (left == right).all()
        assert all((left == right).all() for left, right in zip(ours.pictures(), ours.pictures(), strict=True))
    assert [first.prompt(index).ground_truth for index in range(9)] != [other.prompt(index).ground_truth
                                                                        for index in range(9)]


def test_held_out_prompts_show_held_out_scans_as_supervised_evaluation_does():
    prompts, count = opened("valid"), digits.provider.num_samples(Config(), "valid")
    for index in (0, 3, count + 3):
        prompt = prompts.prompt(index)
        sample = digits.build_sample(Config(), TOKENS, Lane("vision", 0, 1, 1, "valid"), index)
        assert list(prompt.token_ids) == sample.tokens[~sample.target_mask].tolist()
        for picture, image in zip(prompt.pictures(), sample.images, strict=True):
            # Half of one of 255 levels.
            assert np.abs(prompts.normalisation.apply(picture) - image).max() <= 0.5001 / 255 / digits.PIXEL_STD
    assert prompts.prompt(3).ground_truth == prompts.prompt(count + 3).ground_truth


@pytest.mark.parametrize(("flags", "tokens", "expected"), [
    ({"digits_min": 3, "digits_max": 2}, TOKENS, "--digits-min 3 --digits-max 2"),
    ({"digits_valid_fraction": 0.0}, TOKENS, "--digits-valid-fraction 0.0: no scan is held out"),
    ({"digits_words_fraction": 0.5}, TOKENS, "--digits-words-fraction 0.5 is for train_hetero.py"),
    ({}, TokenSpec(64, -1, 0, 3), "--digits-text-only-fraction 0.3: the model takes no images"),
])
def test_impossible_values_are_refused_with_their_flag(flags, tokens, expected):
    with pytest.raises(ValueError, match=expected):
        provider.validate(Config(**flags), tokens)
