"""Rollouts, from prompts to scored completions: requests to the engine, refusals, reported figures."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig
from mimo.observability.trackers import Answer
from mimo.rl.images import ImageTokens, reduced
from mimo.rl.prompts import BadPromptError, Prompt
from mimo.rl.rollouts import (
    Completion,
    Rollouts,
    RolloutSource,
    check_answers,
    draw_seed,
    rollout_metrics,
    with_advantages,
)
from mimo.rollout.engine import Rollout, Sampling

SAMPLING = Sampling(max_tokens=4, n=2, stop_token_ids=(2,))
GOOD = Rollout((7, 2), (-0.5, -0.1), "3", "stop")


class Prompts:
    end_token_id, pad_token_id = 2, 0

    def prompt(self, index):
        return Prompt(f"p{index}", "?" * (index + 1), tuple(range(10, 11 + index)), f"truth {index}", {"place": index})

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


class Engine:
    """Answers every prompt alike, and notes what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def generate(self, prompts, sampling, seeds=()):
        self.asked.append((prompts, sampling, list(seeds)))
        return [list(self.answers) for _ in prompts]


def source(answers=(GOOD, GOOD), reward=lambda *_: 1.0, seq_length=10):
    return RolloutSource(Engine(answers), Prompts(), reward, "own:reward", SAMPLING, seq_length, lambda: None)


def draw(asked, first, count):
    return asked.score(asked.ask(first, count, "3"))


class WithBad(Prompts):
    """Six prompts. The image of 2 cannot be decoded, and that of 3 has no header."""

    num_prompts, max_bad_samples = 6, 2

    def leave_out(self, keys):
        raise AssertionError("prompts that come later would move")

    def prompt(self, index):
        if index % 6 == 3:
            raise BadPromptError("p3: no header", "p3")

        def pictures():
            if index % 6 == 2:
                raise BadPromptError("p2: image 2.png is truncated", "p2")
            return [np.zeros((1, 1, 3), np.uint8)]

        return Prompt(f"p{index % 6}", "?", (10, 9), "truth", {}, ((1, 1),), pictures)


def test_the_prompt_before_takes_the_place_of_one_whose_image_cannot_be_decoded(caplog):
    asked = source()
    asked.prompts, asked.images = WithBad(), ImageTokens({"vision": 9}, lambda *_: 1, 1)
    for first, expected in ((1, (1, 1, 1, 4)), (3, (1, 4, 5, 6)), (8, (7, 7, 10, 11))):
        answers = asked.ask(first, 4, "3")
        assert answers.indices == expected, "whatever the run has asked for before"
        # Encoder ranks find the pixels by this index.
        assert [each.index for each in asked.score(answers).completions[::2]] == list(expected)
    assert asked.score(answers).num_bad == 2 and source().score(source().ask(1, 1, "3")).num_bad is None
    assert asked.num_bad == 2 and len([line for line in caplog.messages if "takes its place" in line]) == 2
    asked = dataclasses.replace(asked, num_bad=1)
    with pytest.raises(ValueError, match="^--max-bad-samples 2: 3 prompts of the run could not be used; the last: p3"):
        asked.ask(1, 4, "3")


def test_completions_carry_what_the_engine_and_the_reward_said():
    other = Rollout((8, 9, 9, 9), (-1.0, -2.0, 0.0, -3.0), "3", "length")
    seen = []

    def reward(prompt, completion, ground_truth, metadata):
        seen.append((prompt, completion, ground_truth, metadata["place"], metadata["finish_reason"]))
        return 0.25 * len(seen)

    asked = source((GOOD, other), reward)
    rollouts = draw(asked, 4, 2)
    assert asked.engine.asked == [([{"prompt_token_ids": [10, 11, 12, 13, 14]},
                                    {"prompt_token_ids": [10, 11, 12, 13, 14, 15]}], SAMPLING, [])]
    assert seen == [("?????", "7 2", "truth 4", 4, "stop"), ("?????", "8 9 9 9", "truth 4", 4, "length"),
                    ("??????", "7 2", "truth 5", 5, "stop"), ("??????", "8 9 9 9", "truth 5", 5, "length")]
    assert rollouts.version == "3" and [each.key for each in rollouts.completions] == ["p4#0", "p4#1", "p5#0", "p5#1"]
    assert [each.prompt for each in rollouts.completions] == [0, 0, 1, 1]
    assert [each.reward for each in rollouts.completions] == [0.25, 0.5, 0.75, 1.0]
    assert rollouts.completions[3] == Completion(
        "p5#1", 1, (10, 11, 12, 13, 14, 15), other.token_ids, other.logprobs, "length", 1.0, index=5)
    assert rollouts.completions[3].length == 10


def test_shown_prompts_have_all_their_completions_with_rewards_and_advantages():
    other = Rollout((8, 9, 9, 9), (-1.0, -2.0, 0.0, -3.0), "3", "length")
    asked = source((GOOD, other), lambda _, completion, *__: float(len(completion)))
    prompts = asked.prompts.prompt
    picture = np.full((300, 600, 3), 7, np.uint8)
    asked.prompts.prompt = lambda index: dataclasses.replace(prompts(index), pictures=lambda: [picture])
    answers = asked.ask(4, 2, "3")
    assert asked.score(answers).shown == ()
    (shown,) = asked.score(answers, num_shown=1).shown
    assert (shown.key, shown.prompt, shown.expected, shown.images) == ("p4", "?????", "truth 4", [])
    assert shown.answers == [Answer("7 2", 3.0), Answer("8 9 9 9", 7.0, truncated=True)]
    (complete,) = with_advantages([shown], [-1.0, 1.0, 0.5, -0.5])
    assert [each.advantage for each in complete.answers] == [-1.0, 1.0]
    assert reduced(picture).shape == (128, 256, 3) and reduced(picture[:9, :9, :1]).shape == (9, 9, 1)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"version": "2"}, "of policy version '2'; the last refit gave the engine version '3'"),
    ({"token_ids": (), "logprobs": ()}, "one has 0 tokens instead of 1 to --max-completion-tokens 4"),
    ({"token_ids": (1,) * 5, "logprobs": (-1.0,) * 5}, "one has 5 tokens"),
    ({"finish_reason": "error"}, r"the engine gave one up after 2 tokens \(error\)"),
    ({"logprobs": (-0.5,)}, "1 log-probs for 2 tokens"),
    ({"logprobs": (-0.5, math.nan)}, "nan is not a log-probability"),
    ({"logprobs": (-math.inf, -0.5)}, "-inf is not a log-probability"),
    ({"logprobs": (0.5, -0.5)}, "0.5 is not a log-probability"),
])
def test_an_answer_that_cannot_be_trained_on_is_refused(changes, expected):
    with pytest.raises(ValueError, match=f"^the engine's answers to prompt p0.*{expected}"):
        source((GOOD, dataclasses.replace(GOOD, **changes))).ask(0, 1, "3")


def test_missing_answers_are_refused():
    prompts = [Prompts().prompt(0), Prompts().prompt(1)]
    with pytest.raises(ValueError, match="answered 1 of 2 prompts"):
        check_answers(prompts, [[GOOD, GOOD]], SAMPLING, "3")
    with pytest.raises(ValueError, match="p1: 1 instead of 2"):
        check_answers(prompts, [[GOOD, GOOD], [GOOD]], SAMPLING, "3")


def test_a_prompt_that_is_too_long_is_refused_before_the_engine_is_asked():
    asked = source(seq_length=8)
    with pytest.raises(ValueError, match="prompt p4 has 5 tokens; with --max-completion-tokens 4 they are more than "
                       "--seq-length 8"):
        asked.ask(3, 2, "3")
    assert asked.engine.asked == []


def test_a_reward_that_fails_is_named():
    def failing(prompt, completion, ground_truth, metadata):
        raise KeyError("nothing")

    with pytest.raises(ValueError, match="--reward own:reward failed on prompt p0, completion '7 2': KeyError"):
        draw(source(reward=failing), 0, 1)
    with pytest.raises(ValueError, match="--reward own:reward failed on prompt p0, completion '7 2': SystemExit: 0"):
        draw(source(reward=lambda *_: sys.exit(0)), 0, 1)
    with pytest.raises(ValueError, match="--reward own:reward gave nan for prompt p0"):
        draw(source(reward=lambda *_: math.nan), 0, 1)
    with pytest.raises(ValueError, match="--reward own:reward failed .* TypeError"):
        draw(source(reward=lambda *_: None), 0, 1)


def test_rewards_on_several_threads_come_in_order_and_stop_at_the_first_that_fails():
    together, seen = threading.Barrier(4, timeout=20), []

    def reward(prompt, completion, ground_truth, metadata):
        seen.append(metadata["place"])
        together.wait()
        time.sleep(0.02 * (8 - metadata["place"]))
        return float(metadata["place"])

    asked = dataclasses.replace(source(reward=reward, seq_length=100), reward_threads=4)
    assert [each.reward for each in draw(asked, 0, 8).completions] == [place for place in range(8) for _ in range(2)]
    assert len(seen) == 16

    def failing(prompt, completion, ground_truth, metadata):
        seen.append(metadata["place"])
        if metadata["place"] == 1:
            raise KeyError("nothing")
        time.sleep(1.0 if len(seen) == 1 else 0.01)
        return 0.0

    seen.clear()
    with pytest.raises(ValueError, match="--reward own:reward failed on prompt p1, .* KeyError"):
        draw(dataclasses.replace(asked, reward=failing, reward_threads=4), 0, 40)
    assert len(seen) < 12, "no more begin, although the first one takes long"


def test_figures_of_completions():
    def completion(prompt, reward, length, reason="stop"):
        return Completion("k", prompt, (1,), (5,) * length, (-1.0,) * length, reason, reward)

    found = rollout_metrics(Rollouts((completion(0, 1.0, 2), completion(0, 1.0, 4, "length"),
                                      completion(1, 0.0, 1), completion(1, 1.0, 1)), "0"))
    assert found == {"reward": 0.75, "reward-std": pytest.approx(math.sqrt(0.1875)), "equal-reward-prompts": 0.5,
                     "completion-length": 2.0, "completion-length-max": 4.0, "truncated-completions": 0.25}
    alone = rollout_metrics(Rollouts((completion(0, 1.0, 2), completion(1, 1.0, 4)), "0"))
    assert alone["equal-reward-prompts"] == 0, "the advantage of a single completion is its reward"


def test_every_prompt_has_a_seed_of_its_own_whatever_it_is_asked_with():
    asked = dataclasses.replace(source(), seed=7)
    asked.ask(3, 2, "3")
    asked.ask(4, 1, "3")
    (_, _, both), (_, _, one) = asked.engine.asked
    assert len(both) == 2 and both[1:] == one and both[0] != both[1]
    assert draw_seed(7, 4) == one[0] and draw_seed(8, 4) != one[0]
    assert all(0 <= draw_seed(7, index) < 2**62 for index in range(100))


def test_completions_end_with_the_tokens_of_the_prompt_set_alone():
    """The end token of a Llama's configuration, 2 by default, is an ordinary token of other tokenizers."""
    from transformers import GenerationConfig, LlamaConfig
    from vllm import SamplingParams

    from mimo.rl.loop import RlLoop

    loop = RlLoop.__new__(RlLoop)
    loop.config = parse_as(RlRunConfig, ["--model-provider", "causal_lm", "--device", "cpu"], DESCRIPTION)
    prompts = Prompts()
    prompts.end_token_id = 9
    loop._splits, loop._images = {"train": prompts, "valid": prompts}, None
    loop._num_bad = {"train": 0, "valid": 0}
    loop.watchdog = SimpleNamespace(progress=lambda: None)
    of_the_model = GenerationConfig.from_model_config(LlamaConfig()).to_diff_dict()
    assert of_the_model["eos_token_id"] == 2
    for split in ("train", "valid"):
        sampling = loop._source(Engine(()), split).sampling
        asked = SamplingParams(stop_token_ids=list(sampling.stop_token_ids), ignore_eos=sampling.ignore_eos)
        asked.update_from_generation_config(of_the_model, 2)
        assert (asked.stop_token_ids, asked.eos_token_id) == ([9], None)


def test_images_that_the_engine_counts_otherwise_are_refused():
    images = ImageTokens({"vision": 12}, lambda module, height, width: height // 4, 3)

    class Images(Prompts):
        def prompt(self, index):
            return dataclasses.replace(super().prompt(index), image_sizes=((8, 8),) if index >= 2 else ())

    def ask(length):
        asked = source((dataclasses.replace(GOOD, prompt_length=length),) * 2)
        asked.prompts, asked.images = Images(), images
        return draw(asked, 2, 1).completions[0]

    # Three tokens, the last of which stands for an image of two.
    completion = ask(4)
    assert (completion.prompt_length, completion.length, completion.image_sizes) == (4, 6, ((8, 8),))
    assert ask(None) == completion
    with pytest.raises(ValueError, match="the engine made 3 tokens of prompt p2, the trainer makes 4: the two "
                       "process its 1 image differently"):
        ask(3)
    asked = source()
    asked.prompts = Images()
    with pytest.raises(ValueError, match="prompt p2 has 1 image, and the model takes none"):
        draw(asked, 2, 1)
