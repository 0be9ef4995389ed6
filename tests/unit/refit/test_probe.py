"""The probe of log-probs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from mimo.refit.meeting import RefitError
from mimo.refit.probe import compare_logprobs

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
OURS = [[-1.0, -2.0], [-3.0]]


class Engine:
    """That has these log-probs."""

    def __init__(self, answers: list[list[float]]) -> None:
        self.answers = answers

    def prompt_logprobs(self, prompts: Any) -> list[list[float]]:
        assert prompts == PROMPTS
        return self.answers


def test_figures_of_a_probe() -> None:
    report = compare_logprobs(Engine([[-1.1, -2.0], [-2.8]]), PROMPTS, OURS, 0.21)
    assert report.max_difference == pytest.approx(0.2) and report.mean_difference == pytest.approx(0.1)
    assert report.kl == pytest.approx((math.exp(0.1) - 1 - 0.1 + math.exp(-0.2) - 1 + 0.2) / 3)
    assert (report.num_tokens, report.worst) == (3, (1, 1))


def test_one_token_beyond_the_tolerance_is_named() -> None:
    engine = Engine([[-1.0, -2.5], [-3.0]])
    for names, shown in (((), "0"), (("sum/3", "sum/4"), "sum/3")):
        expected = (f"token 2 of prompt {shown} has log-prob -2.5 in the engine and -2 in the trainer; they differ by "
                    "0.5 nats, which is more than 0.21; over 3")
        with pytest.raises(RefitError, match=re.escape(expected)):
            compare_logprobs(engine, PROMPTS, OURS, 0.21, names)


def test_tokens_without_a_log_prob_of_the_trainer_are_not_compared() -> None:
    report = compare_logprobs(Engine([[-9.0, -2.1], [-3.0]]), PROMPTS, [[None, -2.0], [-3.0]], 0.21)
    assert (report.num_tokens, report.worst) == (2, (0, 2))


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(RefitError, match=f"token 1 of prompt 1 has log-prob {wrong} in the engine and -3 in the "
                                         "trainer; 1 of 3 tokens"):
        compare_logprobs(Engine([[-1.0, -2.0], [wrong]]), PROMPTS, OURS, 1.0)


def test_both_sides_have_the_same_tokens() -> None:
    with pytest.raises(ValueError, match=r"the trainer's log-probs are of \[2, 1\] tokens, the engine's of \[1, 1\]"):
        compare_logprobs(Engine([[-1.0], [-3.0]]), PROMPTS, OURS, 1.0)
    with pytest.raises(ValueError, match="2 prompts have no token"):
        compare_logprobs(Engine([[], []]), PROMPTS, [[], []], 1.0)
