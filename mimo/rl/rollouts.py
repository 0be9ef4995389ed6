"""From prompts to scored completions on the first rank, with checks of everything that the engine answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from itertools import count as count_from
from typing import Any

import numpy as np

from mimo.config.rl_run import RlRunConfig
from mimo.observability.trackers import MAX_IMAGES, Answer, Generation
from mimo.protocols import ImageSize
from mimo.rl.images import ImageTokens, as_request, reduced, request_digest
from mimo.rl.prompts import (
    BadPromptError,
    FinitePromptSet,
    Prompt,
    PromptSet,
    Reward,
    SkippingPromptSet,
    StoredPromptSet,
    VideoPromptSet,
)
from mimo.rollout.engine import Rollout, Sampling
from mimo.rollout.replicas import RolloutClient
from mimo.text import counted
from mimo.watchdog.process_exit import map_on_threads

logger = logging.getLogger("mimo.rl")


@dataclass(frozen=True)
class Completion:
    """One sequence to train on.

    Attributes:
        key: name of the prompt and number of the completion among the prompt's completions.
        prompt: number of the prompt in the global batch.
        prompt_ids: tokens of the prompt.
        token_ids: tokens of the completion, with its end token if it has one.
        logprobs: natural logarithm of the probability with which the engine drew each of them.
        finish_reason: `stop`, or `length` if the limit cut it.
        reward: score of the completion.
        index: index of the prompt in its data set, by which ranks that encode images find the pixels.
        image_sizes: `(height, width)` in pixels of each image of the prompt, and a `VideoSize` for each placeholder of
            its videos.
        num_image_tokens: tokens that all these become; each has one placeholder among `prompt_ids`.
    """

    key: str
    prompt: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    reward: float
    index: int = -1
    image_sizes: tuple[ImageSize, ...] = ()
    num_image_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, those of its images included."""
        return len(self.prompt_ids) - len(self.image_sizes) + self.num_image_tokens

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, those of images included."""
        return self.prompt_length + len(self.token_ids)


@dataclass(frozen=True)
class Rollouts:
    """The completions of a global batch, as plain data that every rank gets.

    Attributes:
        completions: grouped by prompt.
        version: policy version that drew them.
        rollout_s: seconds that the engine took.
        reward_s: seconds that the rewards took.
        shown: the first prompts with their completions as text, for people to read.
        num_bad: prompts that could not be used so far; None for a set that has no bad ones.
        num_asked: prompts that were completed; with --max-refills there may be more than in the batch.
        figures: `rollout_metrics` of all these; None if they are those of the batch.
    """

    completions: tuple[Completion, ...]
    version: str
    rollout_s: float = 0.0
    reward_s: float = 0.0
    shown: tuple[Generation, ...] = ()
    num_bad: int | None = None
    num_asked: int = 0
    figures: Mapping[str, float] | None = None

    @property
    def groups(self) -> list[tuple[Completion, ...]]:
        """The completions of each prompt."""
        return [tuple(group) for _, group in groupby(self.completions, lambda each: each.prompt)]


@dataclass(frozen=True)
class Answers:
    """Answers of the engine.

    Attributes:
        indices: index of each prompt in the data set.
        prompts: the prompts that the engine was given.
        requests: the form in which it was given them, see `mimo.rl.images.as_request`.
        answers: its answers to each prompt.
        version: policy version that drew them.
        seconds: how long it took.
    """

    indices: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    requests: Sequence[Mapping[str, Any]]
    answers: list[list[Rollout]]
    version: str
    seconds: float


@dataclass
class RolloutSource:
    """Draws and scores completions; on the first rank.

    Attributes:
        engine: completes prompts.
        prompts: what to complete.
        reward: scores completions.
        reward_name: name of the reward for messages.
        sampling: how completions are drawn.
        seq_length: most tokens of prompt and completion together.
        progress: called after each completion that is scored.
        seed: seed of the draws; without one, every draw is different.
        images: how the model takes images; None if it takes none.
        num_bad: prompts that could not be used so far, those that were left out before the run began included.
        reward_threads: completions that are scored at the same time.
    """

    engine: RolloutClient
    prompts: PromptSet
    reward: Reward
    reward_name: str
    sampling: Sampling
    seq_length: int
    progress: Callable[[], None]
    seed: int | None = None
    images: ImageTokens | None = None
    num_bad: int = 0
    reward_threads: int = 1

    def __post_init__(self) -> None:
        self._bad: set[str] = set()

    def usable(self, first: int, count: int) -> tuple[tuple[int, ...], tuple[Prompt, ...], list[dict[str, Any]]]:
        """Return `count` prompts, beginning with number `first`: their indices, prompts and requests.

        Some images can only be decoded in part, which shows when a request is made of them. The last prompt before it
        that can be used takes its place, or else the next one, so that a resumed run asks for the same prompts. Prompts
        before it have been measured. To leave it out of the set would move all others.

        Raises:
            ValueError: more prompts than --max-bad-samples are bad, or all of them.
        """
        indices, prompts, requests = [], [], []
        for place in range(first, first + count):
            tries = self.prompts.num_prompts if isinstance(self.prompts, FinitePromptSet) else 1
            for index in islice(chain(range(place, -1, -1), count_from(place + 1)), tries):
                try:
                    prompt = self.prompts.prompt(index)
                    request = as_request(prompt)
                except BadPromptError as error:
                    self._skip(error)
                    continue
                indices.append(index)
                prompts.append(prompt)
                requests.append(request)
                break
            else:
                raise ValueError("no prompt can be used; the log says why")
        return tuple(indices), tuple(prompts), requests

    def _skip(self, error: BadPromptError) -> None:
        """Count and report a bad prompt, once."""
        if error.key not in self._bad:
            self._bad.add(error.key)
            self.num_bad += 1
            note_bad_prompt(self.prompts, error, self.num_bad, "another prompt takes its place")

    def ask(self, first: int, count: int, version: str) -> Answers:
        """Ask the engine to complete `count` prompts, beginning with number `first`.

        `version` is that of the weights that the last refit gave it.

        Raises:
            ValueError: a prompt is too long, or an answer is not what was asked for.
            RefitError: the engine has ended, did not answer in time or has no weights.
        """
        began = time.perf_counter()
        indices, prompts, requests = self.usable(first, count)
        lengths = []
        for prompt in prompts:
            if not prompt.token_ids:
                raise ValueError(f"prompt {prompt.key} has no token")
            length = prompt_length(prompt, self.images)
            if length + self.sampling.max_tokens > self.seq_length:
                of_images = num_image_tokens(prompt, self.images)
                images = f", {of_images} of them from images" if of_images else ""
                raise ValueError(
                    f"prompt {prompt.key} has {length} tokens{images}; with --max-completion-tokens "
                    f"{self.sampling.max_tokens} they are more than --seq-length {self.seq_length}")
            lengths.append(length)
        seeds = () if self.seed is None else [draw_seed(self.seed, first + place) for place in range(count)]
        answers = self.engine.generate(requests, self.sampling, seeds)
        seconds = time.perf_counter() - began
        check_answers(prompts, answers, self.sampling, version)
        for prompt, length, group in zip(prompts, lengths, answers, strict=True):
            # The engine processes images itself, and must make as many tokens of them as the trainer.
            for answer in group:
                if answer.prompt_length not in (None, length):
                    videos = f" and {counted(len(prompt.videos), 'video')}" if prompt.videos else ""
                    count = len(prompt.image_sizes) - sum(video.num_placeholders for video in prompt.videos)
                    raise ValueError(f"the engine made {answer.prompt_length} tokens of prompt {prompt.key}, the "
                                     f"trainer makes {length}: the two process its {counted(count, 'image')}{videos} "
                                     "differently")
        return Answers(indices, prompts, requests, answers, version, seconds)

    def digests(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a digest of each request and of the way in which it is completed."""
        return [request_digest(request, self.sampling) for request in requests]

    def score(self, asked: Answers, num_shown: int = 0) -> Rollouts:
        """Score the answers, and add `num_shown` of the prompts with their completions as text.

        Raises:
            ValueError: a reward fails; names the prompt.
        """
        began = time.perf_counter()
        # Texts are made on this thread, because a tokenizer need not be safe on several.
        scores = map_on_threads(self._score, (
            (prompt, answer, self.prompts.decode(answer.token_ids))
            for prompt, group in zip(asked.prompts, asked.answers, strict=True) for answer in group),
            self.reward_threads, "rewards")
        completions = tuple(
            Completion(f"{prompt.key}#{number}", place, prompt.token_ids, answer.token_ids, answer.logprobs,
                       answer.finish_reason, next(scores), asked.indices[place], prompt.image_sizes,
                       num_image_tokens(prompt, self.images))
            for place, (prompt, group) in enumerate(zip(asked.prompts, asked.answers, strict=True))
            for number, answer in enumerate(group))
        scored = Rollouts(completions, asked.version, asked.seconds, time.perf_counter() - began,
                          num_bad=self.num_bad if isinstance(self.prompts, SkippingPromptSet) else None,
                          num_asked=len(asked.prompts))
        return replace(scored, shown=tuple(map(self.as_text, asked.prompts[:num_shown], scored.groups)))

    def as_text(self, prompt: Prompt, completions: Sequence[Completion]) -> Generation:
        """Return a prompt and its completions as text, for people to read."""
        texts = [Answer(self.prompts.decode(each.token_ids), each.reward, truncated=each.finish_reason == "length")
                 for each in completions]
        images = [reduced(picture) for picture in prompt.pictures()[:MAX_IMAGES]] if prompt.image_sizes else []
        return Generation(prompt.key, texts, str(prompt.ground_truth), prompt.text, images, len(prompt.image_sizes))

    def _score(self, completed: tuple[Prompt, Rollout, str]) -> float:
        prompt, answer, text = completed
        try:
            metadata = {**prompt.metadata, "finish_reason": answer.finish_reason}
            score = float(self.reward(prompt.text, text, prompt.ground_truth, metadata))
        # A reward is the user's own code and may raise anything; code of a completion that it runs may call sys.exit.
        except (Exception, SystemExit) as error:
            raise ValueError(f"--reward {self.reward_name} failed on prompt {prompt.key}, completion {text[:200]!r}: "
                             f"{type(error).__name__}: {error}") from error
        if not math.isfinite(score):
            raise ValueError(f"--reward {self.reward_name} gave {score} for prompt {prompt.key}, completion "
                             f"{text[:200]!r}")
        self.progress()
        return score


def num_image_tokens(prompt: Prompt, images: ImageTokens | None) -> int:
    """Count the tokens that a prompt's images and videos become. Raises ValueError for what the model does not take."""
    if images is not None:
        return images.count(prompt)
    if prompt.image_sizes:
        raise ValueError(f"prompt {prompt.key} has {counted(len(prompt.image_sizes), 'image')}, and the model takes "
                         "none")
    return 0


def prompt_length(prompt: Prompt, images: ImageTokens | None) -> int:
    """Count the tokens of a prompt, those of its images included. Raises ValueError like `num_image_tokens`."""
    return len(prompt.token_ids) - len(prompt.image_sizes) + num_image_tokens(prompt, images)


def draw_seed(seed: int, index: int) -> int:
    """Return the sampling seed of the prompt at an index. It is the same in a resumed run."""
    drawn = np.random.SeedSequence([seed, index]).generate_state(2)
    # vLLM adds the number of the completion, and torch's seeds must fit a signed 64-bit integer.
    return int(drawn[0]) << 30 | int(drawn[1]) >> 2


def check_answers(prompts: Sequence[Prompt], answers: Sequence[Sequence[Rollout]], sampling: Sampling,
                  version: str) -> None:
    """Refuse answers that are not what was asked for.

    `version` is that of the weights that the last refit gave the engine.

    Raises:
        ValueError: too few answers, another version, no tokens, log-probs that do not belong to them, or an end that is
            neither the policy's nor the length limit's.
    """
    if len(answers) != len(prompts):
        raise ValueError(f"the engine answered {len(answers)} of {len(prompts)} prompts")
    for prompt, group in zip(prompts, answers, strict=True):
        where = f"the engine's answers to prompt {prompt.key}"
        if len(group) != sampling.n:
            raise ValueError(f"{where}: {len(group)} instead of {sampling.n}")
        for answer in group:
            if answer.version != version:
                raise ValueError(f"{where} are of policy version {answer.version!r}; the last refit gave the engine "
                                 f"version {version!r}")
            if not 0 < len(answer.token_ids) <= sampling.max_tokens:
                raise ValueError(f"{where}: one has {len(answer.token_ids)} tokens instead of 1 to "
                                 f"--max-completion-tokens {sampling.max_tokens}")
            if answer.finish_reason not in ("stop", "length"):
                raise ValueError(f"{where}: the engine gave one up after {len(answer.token_ids)} tokens "
                                 f"({answer.finish_reason})")
            if len(answer.logprobs) != len(answer.token_ids):
                raise ValueError(f"{where}: {len(answer.logprobs)} log-probs for {len(answer.token_ids)} tokens")
            wrong = [value for value in answer.logprobs if not math.isfinite(value) or value > 0]
            if wrong:
                raise ValueError(f"{where}: {wrong[0]} is not a log-probability")


def teaches(completions: Sequence[Completion]) -> bool:
    """Return whether the rewards of a prompt's completions give them advantages, because not all are the same.

    The advantage of a single completion is its reward.
    """
    return len(completions) == 1 or len({each.reward for each in completions}) > 1


def places_of_batch(groups: Sequence[Sequence[Completion]], count: int) -> list[int]:
    """Return the places of `count` prompts, in order: the first ones that teach something, then the first others."""
    ranked = sorted(range(len(groups)), key=lambda place: not teaches(groups[place]))
    return sorted(ranked[:count])


def batch_of(drawn: Sequence[Rollouts], places: Sequence[int]) -> Rollouts:
    """Return the batch of the prompts at some places among those of rollouts that followed each other."""
    groups = [group for each in drawn for group in each.groups]

    def numbered(places: Sequence[int]) -> tuple[Completion, ...]:
        return tuple(replace(each, prompt=number) for number, place in enumerate(places) for each in groups[place])

    whole = replace(drawn[-1], completions=numbered(range(len(groups))))
    return replace(whole, completions=numbered(places), rollout_s=sum(each.rollout_s for each in drawn),
                   reward_s=sum(each.reward_s for each in drawn), num_asked=len(groups),
                   figures=rollout_metrics(whole) if len(groups) > len(places) else None)


def with_advantages(shown: Sequence[Generation], values: Sequence[float]) -> list[Generation]:
    """Return the first prompts of a global batch with the advantages of their completions."""
    left = iter(values)
    return [replace(prompt, answers=[replace(answer, advantage=next(left)) for answer in prompt.answers])
            for prompt in shown]


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Compute figures of the completions: rewards, lengths, share of truncated ones, share of prompts without a signal.

    See `teaches` for the last.
    """
    completions = rollouts.completions
    count = len(completions)
    rewards = [each.reward for each in completions]
    mean = sum(rewards) / count
    lengths = [len(each.token_ids) for each in completions]
    groups = rollouts.groups
    return {
        "reward": mean,
        "reward-std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / count),
        "equal-reward-prompts": sum(not teaches(group) for group in groups) / len(groups),
        "completion-length": sum(lengths) / count,
        "completion-length-max": float(max(lengths)),
        "truncated-completions": sum(each.finish_reason == "length" for each in completions) / count,
    }


@dataclass(frozen=True)
class Measured:
    """Result of measuring prompts.

    Attributes:
        has_videos: whether prompts that were measured have videos; for a set without end, whether they may have some.
        left_out: names of the prompts that were left out, which every other rank that opens the set has to leave out.
        num_bad: how many of these could not be used.
    """

    has_videos: bool
    left_out: tuple[str, ...] = ()
    num_bad: int = 0


def note_bad_prompt(prompts: PromptSet, error: BadPromptError, num_bad: int, then: str) -> None:
    """Report a bad prompt, one of `num_bad` so far. Raises ValueError if there are more than --max-bad-samples."""
    limit = prompts.max_bad_samples if isinstance(prompts, SkippingPromptSet) else 0
    if num_bad > limit:
        raise ValueError(f"--max-bad-samples {limit}: {counted(num_bad, 'prompt')} of the run could not be used; the "
                         f"last: {error}") from error
    logger.warning("a prompt cannot be used, %s: %s", then, error)


def fit_prompts(prompts: PromptSet, split: str, config: RlRunConfig, images: ImageTokens | None,
                num_asked: int, num_measured: int = 0, num_bad: int = 0) -> Measured:
    """Refuse the prompts of a finite set that are too long, or leave them out with `--skip-long-prompts`.

    This finds them before the run begins. Prompts of a set without end are checked when their turn comes. Prompts that
    cannot be used are left out, up to --max-bad-samples.

    Args:
        prompts: prompts of a split; those that are too long are left out in place.
        split: `train` or `valid`.
        config: the run.
        images: how the model takes images; None if it takes none.
        num_asked: number of prompts that the whole run may use, from the first one on.
        num_measured: how many of them, from the first one on, an earlier call has found to fit; 0 with
            `--skip-long-prompts`.
        num_bad: how many prompts earlier calls have left out because they cannot be used.

    Raises:
        ValueError: a prompt that the run uses is too long, or every prompt is, or too many cannot be used; names flags
            and values.
    """
    skips, name = config.data.skip_long_prompts, config.data.dataset_provider
    if not isinstance(prompts, FinitePromptSet):
        if skips:
            raise ValueError(f"--skip-long-prompts: --dataset-provider {name} has no list of prompts (num_prompts "
                             "and leave_out of mimo.rl.prompts.FinitePromptSet); leave the flag out")
        return Measured(isinstance(prompts, VideoPromptSet) and prompts.video_processing is not None)
    tokens, completion = config.train.seq_length, config.rollout.max_completion_tokens
    limit, total = tokens - completion, prompts.num_prompts
    # What is left out must not depend on the length of the run, so that a longer run continues in the same order.
    count = total if skips else min(total, num_asked)
    lengths, has_videos, bad, first = {}, False, list[str](), num_measured
    while first < count:
        before = len(bad)
        indices: Sequence[int] = range(first, count)
        for index in prompts.in_stored_order(indices) if isinstance(prompts, StoredPromptSet) else indices:
            try:
                prompt = prompts.prompt(index)
            except BadPromptError as error:
                bad.append(error.key)
                note_bad_prompt(prompts, error, num_bad + len(bad), "it is left out")
                continue
            has_videos = has_videos or bool(prompt.videos)
            if (length := prompt_length(prompt, images)) > limit:
                lengths[prompt.key] = length
        # For each bad prompt, a further one moves up.
        first, count = count, min(total, count + len(bad) - before)
    if bad and len(bad) == total:
        raise ValueError(f"none of the {total} prompts of the {split} split of {name} can be used; the log says why")
    if not lengths:
        if bad:
            prompts.leave_out(frozenset(bad))
        return Measured(has_videos, tuple(bad), len(bad))
    key, longest = max(lengths.items(), key=lambda item: item[1])
    said = (f"{len(lengths)} of {count} prompts of the {split} split of {name} have more than the {limit} tokens that "
            f"--seq-length {tokens} leaves beside --max-completion-tokens {completion}; the longest, {key}, has "
            f"{longest}")
    if not skips:
        raise ValueError(f"{said}: give --seq-length {longest + completion} or more, or --skip-long-prompts")
    if len(lengths) + len(bad) == total:
        raise ValueError(f"--skip-long-prompts leaves nothing: {said}")
    prompts.leave_out(frozenset((*bad, *lengths)))
    logger.info("--skip-long-prompts: %s. They are left out", said)
    return Measured(has_videos, (*bad, *lengths), len(bad))


def check_num_held_out(prompts: PromptSet, config: RlRunConfig) -> None:
    """Refuse an evaluation of more held-out prompts than there are, which would count some of them twice.

    `prompts` are those of the `valid` split, without those that are left out.

    Raises:
        ValueError: there are fewer than --eval-prompts.
    """
    asked = config.rl.eval_prompts
    if isinstance(prompts, FinitePromptSet) and asked > prompts.num_prompts:
        raise ValueError(f"--eval-prompts {asked}: the valid split of {config.data.dataset_provider} has "
                         f"{counted(prompts.num_prompts, 'prompt')}, and some would count more than once; give "
                         f"--eval-prompts {prompts.num_prompts} or less")
