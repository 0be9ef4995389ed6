"""Exact match: short answers compared as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.rl.rewards.protocol import visible_text


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion without `<think>...</think>` equals the ground truth, else 0.0.

    White space around both is ignored, and any white space inside counts as one space. Case and punctuation matter.

    Args:
        prompt: shows whether the completion begins inside a `<think>` block.
        completion: the model's text.
        ground_truth: the answer.
        metadata: not used.

    Raises:
        ValueError: the ground truth is empty.
    """
    wanted = ground_truth.split()
    if not wanted:
        raise ValueError("exact-match: the ground truth is empty")
    text = visible_text(prompt, completion)
    return float(text is not None and text.split() == wanted)
