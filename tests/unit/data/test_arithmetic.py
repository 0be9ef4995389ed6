"""Generated sums: deterministic, held out for good, right answers, characters as tokens."""

from __future__ import annotations

from itertools import islice

import pytest

from data import arithmetic, character_tokenizer
from data.arithmetic import Config, is_held_out, provider
from mimo import registry
from mimo.protocols import Lane, RoutedDataProvider, TokenSpec
from mimo.rl.rewards.gsm8k import reward

TOKENS = TokenSpec(character_tokenizer.VOCAB_SIZE, image_token_id=-1, image_size=0, num_channels=0)


@pytest.mark.parametrize("form", ["sum", "words"])
def test_prompts_are_a_function_of_seed_split_and_index(form):
    config = Config(arithmetic_form=form)
    one, same, other = (provider.open(config, TOKENS, "train", seed) for seed in (3, 3, 4))
    texts = [one.prompt(index).text for index in range(20)]
    assert [same.prompt(index).text for index in reversed(range(20))] == texts[::-1]
    assert len({*texts}) > 15 and [other.prompt(index).text for index in range(20)] != texts


@pytest.mark.parametrize("split", ["train", "valid"])
def test_no_sum_is_in_both_splits(split):
    config = Config(arithmetic_max=12)
    for seed in (0, 1):
        prompts = provider.open(config, TOKENS, split, seed)
        for index in range(100):
            first, second = prompts.prompt(index).metadata["numbers"]
            assert is_held_out(config, first, second) == is_held_out(config, second, first) == (split == "valid")


@pytest.mark.parametrize("form", ["sum", "words"])
def test_the_ground_truth_is_what_the_reward_reads(form):
    prompts = provider.open(Config(arithmetic_form=form), TOKENS, "train", 1)
    for index in range(10):
        prompt = prompts.prompt(index)
        total = sum(prompt.metadata["numbers"])
        assert reward(prompt.text, f"it is {total}\n#### {total}", prompt.ground_truth, {}) == 1.0
        assert reward(prompt.text, f"#### {total + 1}", prompt.ground_truth, {}) == 0.0
        assert all(str(number) in prompt.text for number in prompt.metadata["numbers"])


def test_a_character_is_a_token_and_comes_back():
    prompts = provider.open(Config(arithmetic_form="words"), TOKENS, "train", 1)
    prompt = prompts.prompt(0)
    assert len(prompt.token_ids) == len(prompt.text)
    assert prompts.decode(prompt.token_ids) == prompt.text
    assert prompts.decode((*prompt.token_ids, prompts.end_token_id, prompts.pad_token_id)) == prompt.text


def test_the_tokenizer_on_disk_is_the_same(tmp_path):
    folder = character_tokenizer.write(tmp_path / "tokenizer")
    written = provider.open(Config(tokenizer=str(folder)), TOKENS, "train", 1)
    assert written.prompt(5) == provider.open(Config(), TOKENS, "train", 1).prompt(5)
    assert (written.end_token_id, written.pad_token_id) == (2, 0)


def test_an_end_that_a_tokenizer_adds_does_not_end_the_prompt(tmp_path, monkeypatch):
    tokenizer = character_tokenizer.build()
    monkeypatch.setattr(arithmetic.character_tokenizer, "build", lambda: Ending(tokenizer))
    assert provider.open(Config(), TOKENS, "train", 1).prompt(0).token_ids[-1] != 2


class Ending:
    """A tokenizer that puts its end token behind every text."""

    def __init__(self, inner):
        self.eos_token_id, self.pad_token_id, self.get_vocab = inner.eos_token_id, inner.pad_token_id, inner.get_vocab
        self._inner = inner

    def __call__(self, text):
        return {"input_ids": [*self._inner(text)["input_ids"], self.eos_token_id]}


@pytest.mark.parametrize(("fields", "tokens", "expected"), [
    ({"arithmetic_max": 5}, TOKENS, "--arithmetic-max 5 is below 9"),
    ({"arithmetic_valid_fraction": 0.0}, TOKENS, "--arithmetic-valid-fraction 0.0: must be between"),
    ({"arithmetic_slip_fraction": 1.1}, TOKENS, "--arithmetic-slip-fraction 1.1: must be between 0 and 1"),
    ({"tokenizer": "nowhere"}, TOKENS, "--tokenizer nowhere: there is no such folder"),
    ({}, TokenSpec(98, image_token_id=-1, image_size=0, num_channels=0),
     "the tokenizer of characters has token ids up to 99, the model's --vocab-size is 98"),
    ({}, TokenSpec(99, image_token_id=-1, image_size=0, num_channels=0), "up to 99, the model's --vocab-size is 99"),
])
def test_impossible_values_are_refused_with_their_flag(fields, tokens, expected):
    with pytest.raises(ValueError, match=expected):
        provider.validate(Config(**fields), tokens)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_samples_to_learn_from_are_the_prompts_with_their_answers(split):
    config = Config(arithmetic_form="words")
    prompts = provider.open(config, TOKENS, split, 3)
    stream = provider.stream(config, TOKENS, Lane("language", 1, 2, 3, split))
    for index in (1, 3, 5):
        prompt, sample = prompts.prompt(index), next(stream)
        assert sample.key == prompt.key
        tokens = sample.tokens.tolist()
        assert tuple(tokens[: len(prompt.token_ids)]) == prompt.token_ids
        answer = [token for token, is_target in zip(tokens, sample.target_mask, strict=True) if is_target]
        assert sample.target_mask.sum() == len(tokens) - len(prompt.token_ids)
        assert answer[-1] == prompts.end_token_id and prompts.decode(answer) == prompt.ground_truth
        assert provider.decode(config, [*answer, *answer]) == prompt.ground_truth, "up to the end token"
        assert reward(prompt.text, provider.decode(config, answer), prompt.ground_truth, {}) == 1.0


def test_some_answers_to_learn_from_are_one_too_many():
    config, clean = Config(arithmetic_slip_fraction=0.6), Config()
    for split, expected in (("train", 0.6), ("valid", 0.0)):
        given, right = (provider.stream(each, TOKENS, Lane("language", 0, 1, 3, split)) for each in (config, clean))
        slips = 0
        for sample, other in zip(islice(given, 300), islice(right, 300), strict=True):
            texts = [provider.decode(config, each.tokens[each.target_mask].tolist()) for each in (sample, other)]
            written, answer = (int(text.removeprefix("#### ")) for text in texts)
            assert sample.key == other.key and written - answer in (0, 1)
            slips += written - answer
        assert slips / 300 == pytest.approx(expected, abs=0.1), split
    prompts = [provider.open(each, TOKENS, "train", 3).prompt(5) for each in (config, clean)]
    assert prompts[0] == prompts[1], "what completions are scored by is right"


def test_both_programs_know_it_by_one_name():
    assert registry.dataset_provider("arithmetic") is registry.prompt_provider("arithmetic") is provider
    assert not isinstance(provider, RoutedDataProvider), "every rank makes its own sums"
