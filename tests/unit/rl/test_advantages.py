"""Advantages against numbers computed by hand."""

import pytest
import torch

from mimo.rl.losses import advantages

# Rewards 1, 0, 0, 1, 1: mean 0.6, squares 1.2, unbiased std sqrt(0.3); 2, 4: mean 3, std sqrt(2); 7 is alone.
REWARDS = [1, 0, 2, 0, 1, 1, 4, 7]
PROMPTS = [0, 0, 1, 0, 0, 0, 1, 2]
SQRT_03, SQRT_2 = 0.5477225575, 1.4142135624
EXPECTED = {
    "grpo": [0.4 / SQRT_03, -0.6 / SQRT_03, -1 / SQRT_2, -0.6 / SQRT_03, 0.4 / SQRT_03, 0.4 / SQRT_03, 1 / SQRT_2, 7],
    "dr-grpo": [0.4, -0.6, -1, -0.6, 0.4, 0.4, 1, 7],
    # Against the mean of the others: 1 - 2/4, 0 - 3/4, 2 - 4.
    "rloo": [0.5, -0.75, -2, -0.75, 0.5, 0.5, 2, 7],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_numbers_by_hand(kind):
    got = advantages(REWARDS, PROMPTS, kind)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(EXPECTED[kind]), atol=1e-5, rtol=1e-5)


def test_the_epsilon_is_added_to_the_standard_deviation():
    # Unbiased std of 0 and 2e-6 is 1.414e-6; with 1e-6 added.
    expected = 1e-6 / (2e-6 / SQRT_2 + 1e-6)
    assert advantages([0.0, 2e-6], [0, 0], "grpo").tolist() == pytest.approx([-expected, expected], rel=1e-5)


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_teach_nothing(kind, value):
    assert advantages([value] * 7, [0] * 7, kind).abs().max() < 1e-6


@pytest.mark.parametrize("kind", EXPECTED)
def test_order_does_not_matter(kind):
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = advantages([REWARDS[i] for i in order], [PROMPTS[i] for i in order], kind)
    torch.testing.assert_close(shuffled, advantages(REWARDS, PROMPTS, kind)[order])


def test_a_prompt_without_completions_changes_nothing():
    assert advantages([1.0, 0.0], [5, 5], "dr-grpo").tolist() == [0.5, -0.5]
    assert advantages([], [], "grpo").tolist() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number(bad):
    with pytest.raises(ValueError, match=f"completion 1 of prompt 4: reward {bad} is not finite"):
        advantages([0.0, bad], [4, 4], "grpo")
