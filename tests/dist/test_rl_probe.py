"""`--refit-verify-interval`: the trainer's side on any layout, and what becomes of an engine that differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
import torch

from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.refit.rendezvous import RefitError
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.policy import PolicyTrainer
from mimo.rl.probe import NUM_TOKENS, Expected, LogProbs, RefitProbe
from mimo.watchdog.process_exit import ReportedElsewhereError
from tests.support import equality
from tests.support.vlm_updates import IMAGE_TOKEN, TOKENS_OF_IMAGE, VOCAB_SIZE, PictureSet, parsed


class Engine:
    """An engine that gives prepared answers.

    Attributes:
        answers: to the prompts, whatever they are.
        asked: their tokens.
    """

    answers: list[list[float]]
    asked: list[list[int]]

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Whatever is asked."""
        self.asked = [prompt["prompt_token_ids"] for prompt in prompts]
        return self.answers


def probe(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig) -> (
        tuple[list[list[list[int]]], Expected, Expected, list[str]]):
    """Return what the trainer expects with its weights and with scrambled ones, and this rank's verdicts on engines.

    Returns:
        The sequences (on the first rank); both expectations; complaints about an engine with the right log-probs, and
        about one that is 0.01 nats off at every token.
    """
    from mimo.registry import model_provider

    run = parsed(config, flags)
    layout = validate(run, world_size)
    with equality.open_trainer(run, layout) as parts:
        images = ImageTokens.of(model_provider("llava"), run.model_family, layout)
        prompts = PictureSet() if needs_pixels(layout, rank) else None
        policy = PolicyTrainer(parts, config, VOCAB_SIZE, 0, images, prompts)
        engine = Engine()
        made = RefitProbe(run, policy, PictureSet() if rank == 0 else None, engine if rank == 0 else None, VOCAB_SIZE)
        before = [parameter.detach().clone() for parameter in parts.built.model.parameters()]
        found, told = made.expect(), []
        with made.scrambled() as other:
            pass
        after = list(parts.built.model.parameters())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), "weights come back"
        for change in (0.0, 0.01):
            engine.answers = [[0.0 if value is None else value + change for value in row] for row in found.logprobs]
            try:
                made.compare(found, "the weights")
                told.append("")
            except (RefitError, ReportedElsewhereError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return [engine.asked] if rank == 0 else [], found, other, told


pytestmark = pytest.mark.slow

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, max_tokens_per_microbatch=48)


def distance(first: LogProbs, second: LogProbs) -> float:
    return fmean(abs(a - b) for left, right in zip(first, second, strict=True)
                 for a, b in zip(left, right, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize(("ranks", "flags"), [(3, "--encoder-dp 2"), (4, "--llm-pp 2 --encoder-dp 2"),
                                              (3, "--llm-tp 2 --sequence-parallel")])
def test_log_probs_are_the_same_on_every_layout_also_of_scrambled_weights(pool, ranks, flags):
    one = dataclasses.replace(CONFIG, temperature=1.0)
    ((((asked,), expected, scrambled, _)),) = pool.run(probe, ("--layout", "colocated"), 1, one, world_size=1)
    tokens = [[token for token in row for _ in range(TOKENS_OF_IMAGE if token == IMAGE_TOKEN else 1)] for row in asked]
    assert sum(map(len, tokens)) >= NUM_TOKENS and {token for row in tokens for token in row} == set(range(61))
    assert [[value is None for value in row] for row in expected.logprobs] == [
        [token == IMAGE_TOKEN for token in row[1:]] for row in tokens], "every token but the first and those of images"
    noise = distance(expected.logprobs, expected.rounded)
    assert 0 < noise < 1e-5 < 0.1 < distance(expected.logprobs, scrambled.logprobs)
    (_, found, other, (same, off)), *others = pool.run(probe, tuple(flags.split()), ranks, CONFIG,
                                                       world_size=ranks)
    for theirs, ours in ((expected.logprobs, found.logprobs), (scrambled.logprobs, other.logprobs)):
        for row, own in zip(theirs, ours, strict=True):
            assert own == [None if value is None else pytest.approx(value, abs=2e-5) for value in row]
    assert same == ""
    assert off.startswith("RefitError: --refit-verify-interval: after a refit of the weights, engine and trainer do "
                          "not compute with the same weights: over ")
    assert "their log-probs differ by 0.01 nats on average" in off
    assert all(told == ["", "ReportedElsewhereError: rank 0 reports what is wrong"] for *_, told in others)
