"""The comparison of log-probs of engine and trainer."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from mimo.refit.rendezvous import RefitError
from mimo.rl.probe import KL_FLOOR, MEAN_FLOOR, Expected, compare_logprobs

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
OURS = [[-1.0, -2.0], [-3.0]]
# Rounding changes every token by 0.1.
NOISE_FACTOR = 2.0
EXPECTED = Expected(OURS, [[-1.1, -1.9], [-3.1]], NOISE_FACTOR)


class Engine:
    """An engine that answers with these log-probs."""

    def __init__(self, answers: list[list[float]]) -> None:
        self.answers = answers

    def prompt_logprobs(self, prompts: Any) -> list[list[float]]:
        assert prompts == PROMPTS
        return self.answers


def k3(difference: float) -> float:
    return math.expm1(difference) - difference


def test_figures_and_limits_of_a_comparison() -> None:
    report = compare_logprobs(Engine([[-1.1, -2.0], [-2.8]]), PROMPTS, EXPECTED)
    assert report.mean_difference == pytest.approx(0.1)
    assert report.kl == pytest.approx((k3(0.1) + k3(-0.2)) / 3)
    assert report.mean_limit == pytest.approx(NOISE_FACTOR * 0.1 + MEAN_FLOOR)
    assert report.kl_limit == pytest.approx(NOISE_FACTOR ** 2 * (2 * k3(0.1) + k3(-0.1)) / 3 + KL_FLOOR)
    assert (report.num_tokens, report.worst) == (3, (1, 1))


def test_more_than_rounding_explains_is_refused_with_the_worst_token() -> None:
    engine = Engine([[-2.0, -2.0], [-4.0]])
    for names, shown in (((), "0"), (("sum/3", "sum/4"), "sum/3")):
        expected = ("over 3 tokens their log-probs differ by 0.667 nats on average, and k3 is 0.479; rounding "
                    f"explains {NOISE_FACTOR * 0.1 + MEAN_FLOOR:.3g} and ")
        with pytest.raises(RefitError, match=re.escape(expected)) as refused:
            compare_logprobs(engine, PROMPTS, EXPECTED, names)
        assert f"token 1 of prompt {shown} has log-prob -2 in the engine and -1 in the trainer" in str(refused.value)


def test_one_token_far_off_in_the_noise_of_many_is_no_alarm() -> None:
    """In bfloat16 a router sends a token elsewhere now and then, with the same weights."""
    ours = [[-2.0] * 500, [-3.0]]
    noise = Expected(ours, [[-2.0 + 0.1 * (-1) ** place for place in range(500)], [-3.1]], NOISE_FACTOR)
    answers = [[-2.0 + 0.1 * (-1) ** place for place in range(499)] + [-7.0], [-3.0]]
    assert compare_logprobs(Engine(answers), PROMPTS, noise).worst == (0, 500)


def test_tokens_without_a_log_prob_of_the_trainer_are_not_compared() -> None:
    report = compare_logprobs(Engine([[-9.0, -2.1], [-3.0]]), PROMPTS,
                              Expected([[None, -2.0], [-3.0]], [[None, -2.1], [-3.1]], NOISE_FACTOR))
    assert (report.num_tokens, report.worst) == (2, (0, 2))


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(RefitError, match=f"token 1 of prompt 1 has log-prob {wrong} in the engine and -3 in the "
                                         "trainer; 1 of 3 tokens"):
        compare_logprobs(Engine([[-1.0, -2.0], [wrong]]), PROMPTS, EXPECTED)


def test_both_sides_have_the_same_tokens() -> None:
    with pytest.raises(ValueError, match=r"the trainer's log-probs are of \[2, 1\] tokens, the engine's of \[1, 1\]"):
        compare_logprobs(Engine([[-1.0], [-3.0]]), PROMPTS, EXPECTED)
    with pytest.raises(ValueError, match="2 prompts have no token"):
        compare_logprobs(Engine([[], []]), PROMPTS, Expected([[], []], [[], []], NOISE_FACTOR))
