"""`--refit-verify-interval`: the trainer's side on any layout, and what becomes of an engine that differs."""

from __future__ import annotations

import dataclasses
from statistics import fmean

import pytest

from mimo.config.rl import RlConfig
from mimo.rl.probe import NUM_TOKENS, LogProbs
from tests.support import rl_probe
from tests.support.spawn import WorkerPool
from tests.support.vlm_updates import IMAGE_TOKEN, TOKENS_OF_IMAGE

pytestmark = pytest.mark.slow

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, max_tokens_per_microbatch=48)


def distance(first: LogProbs, second: LogProbs) -> float:
    return fmean(abs(a - b) for left, right in zip(first, second, strict=True)
                 for a, b in zip(left, right, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize(("ranks", "flags"), [(3, "--encoder-dp 2"), (4, "--llm-pp 2 --encoder-dp 2"),
                                              (3, "--llm-tp 2 --sequence-parallel")])
def test_log_probs_are_the_same_on_every_layout_also_of_scrambled_weights(pool: WorkerPool, ranks: int,
                                                                          flags: str) -> None:
    one = dataclasses.replace(CONFIG, temperature=1.0)
    ((((asked,), expected, scrambled, _)),) = pool.run(rl_probe.probe, ("--layout", "colocated"), 1, one, world_size=1)
    tokens = [[token for token in row for _ in range(TOKENS_OF_IMAGE if token == IMAGE_TOKEN else 1)] for row in asked]
    assert sum(map(len, tokens)) >= NUM_TOKENS and {token for row in tokens for token in row} == set(range(61))
    assert [[value is None for value in row] for row in expected.logprobs] == [
        [token == IMAGE_TOKEN for token in row[1:]] for row in tokens], "every token but the first and those of images"
    noise = distance(expected.logprobs, expected.rounded)
    assert 0 < noise < 1e-5 < 0.1 < distance(expected.logprobs, scrambled.logprobs)
    (_, found, other, (same, off)), *others = pool.run(rl_probe.probe, tuple(flags.split()), ranks, CONFIG,
                                                       world_size=ranks)
    for theirs, ours in ((expected.logprobs, found.logprobs), (scrambled.logprobs, other.logprobs)):
        for row, own in zip(theirs, ours, strict=True):
            assert own == [None if value is None else pytest.approx(value, abs=2e-5) for value in row]
    assert same == ""
    assert off.startswith("RefitError: --refit-verify-interval: after a refit of the weights, engine and trainer do "
                          "not compute with the same weights: over ")
    assert "their log-probs differ by 0.01 nats on average" in off
    assert all(told == ["", "ReportedElsewhereError: rank 0 reports what is wrong"] for *_, told in others)
