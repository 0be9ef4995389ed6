"""Exact match: short answers compared as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.rl.rewards.reasoning import visible_text


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """1.0 where the completion outside of `<think>...</think>` is the ground truth, else 0.0.

    White space around both does not matter, and any white space inside counts as one space. Case and punctuation do.

    Args:
        prompt: tells whether the completion begins with thinking.
        completion: the model's text.
        ground_truth: the answer.
        metadata: no effect.

    Raises:
        ValueError: the ground truth is empty.
    """
    wanted = ground_truth.split()
    if not wanted:
        raise ValueError("exact-match: the ground truth is empty")
    text = visible_text(prompt, completion)
    return float(text is not None and text.split() == wanted)
