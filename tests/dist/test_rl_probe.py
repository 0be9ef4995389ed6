"""`--refit-verify`: the trainer's log-probs of prompts on any layout, and what becomes of an engine that differs."""

from __future__ import annotations

import dataclasses

import pytest

from mimo.config.rl import RlConfig
from tests.support import rl_probe
from tests.support.spawn import WorkerPool
from tests.support.vlm_updates import IMAGE_TOKEN, PROMPTS, TOKENS_OF_IMAGE

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, max_tokens_per_microbatch=48)


def expanded(prompt: tuple[int, ...]) -> list[int]:
    return [token for token in prompt for _ in range(TOKENS_OF_IMAGE if token == IMAGE_TOKEN else 1)]


@pytest.mark.parametrize(("ranks", "flags"), [(3, "--encoder-dp 2"), (4, "--llm-pp 2 --encoder-dp 2"),
                                              (3, "--llm-tp 2 --sequence-parallel")])
def test_log_probs_of_prompts_are_the_same_everywhere_at_any_temperature(pool: WorkerPool, ranks: int,
                                                                         flags: str) -> None:
    one = dataclasses.replace(CONFIG, temperature=1.0)
    ((expected, _),) = pool.run(rl_probe.probe, ("--layout", "colocated"), 1, one, world_size=1)
    tokens = [expanded(PROMPTS[index % len(PROMPTS)]) for index in range(8)]
    assert [[value is None for value in row] for row in expected] == [
        [token == IMAGE_TOKEN for token in row[1:]] for row in tokens], "every token but the first and those of images"
    (found, (same, other)), *others = pool.run(rl_probe.probe, tuple(flags.split()), ranks, CONFIG, world_size=ranks)
    for row, theirs in zip(found, expected, strict=True):
        assert row == [None if value is None else pytest.approx(value, abs=1e-5) for value in theirs]
    assert same == ""
    assert other.startswith("RefitError: --refit-verify: engine and trainer do not have the same weights: token ")
    assert " of prompt prompt " in other and "differ by 0.01 nats, which is more than 0.001" in other
    assert all(told == ["", "ReportedElsewhereError: rank 0 reports what is wrong"] for _, told in others)
