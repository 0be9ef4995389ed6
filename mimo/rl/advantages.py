"""Advantages of completions: how much better each is than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

STD_EPSILON = 1e-6

Advantage = Literal["grpo", "dr-grpo", "rloo"]


def advantages(rewards: Sequence[float], prompts: Sequence[int], kind: Advantage) -> torch.Tensor:
    """One advantage for each completion, from the rewards of all completions of its prompt.

    - grpo: (r - mean) / (std + 1e-6), std with n - 1 in the denominator (arXiv:2402.03300, equation 4).
    - dr-grpo: r - mean (arXiv:2503.20783).
    - rloo: r - mean of the others = (r - mean) n / (n - 1) (arXiv:2402.14740).

    A prompt with one completion has mean 0 and std 1, so that its reward itself remains.

    Args:
        rewards: of each completion.
        prompts: index of the prompt of each completion, from 0; in any order.
        kind: which.

    Returns:
        float32 `[completions]`.

    Raises:
        ValueError: a reward is not finite.
    """
    assert len(rewards) == len(prompts), f"{len(rewards)} rewards for {len(prompts)} completions"
    # float64: the mean of equal rewards must be the reward, or dividing by 1e-6 would make much of the difference.
    reward = torch.tensor(rewards, dtype=torch.float64)
    for index in torch.nonzero(~reward.isfinite()).flatten().tolist():
        raise ValueError(f"completion {index} of prompt {prompts[index]}: reward {rewards[index]} is not finite")
    group = torch.tensor(prompts, dtype=torch.int64)
    num_groups = int(group.max()) + 1 if len(prompts) else 0
    count = torch.bincount(group, minlength=num_groups).double()
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, reward) / count.clamp(min=1)
    mean[count == 1] = 0.0
    centred = reward - mean[group]
    if kind == "dr-grpo":
        return centred.float()
    others = (count - 1).clamp(min=1)
    if kind == "rloo":
        return (centred * torch.where(count == 1, 1.0, count / others)[group]).float()
    assert kind == "grpo", kind
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centred.square())
    std = torch.where(count == 1, 1.0, (squares / others).sqrt())
    return (centred / (std[group] + STD_EPSILON)).float()
