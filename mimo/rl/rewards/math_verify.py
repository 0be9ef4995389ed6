"""Mathematical answers compared as expressions, by the package math-verify (`pip install math-verify`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from mimo.rl.rewards.reasoning import visible_text


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    r"""1.0 where the completion's expression equals the ground truth's, else 0.0.

    The package takes the answer from `\boxed{}`, `$...$` or plain text, and gives up on an expression after 5 s. It
    does that by a signal: call this on a process's main thread.

    Args:
        prompt: tells whether the completion begins with thinking.
        completion: the model's text.
        ground_truth: an expression, in LaTeX or plain.
        metadata: no effect.

    Raises:
        ValueError: the ground truth is no expression.
    """
    # A bare expression in LaTeX is read as such only between dollars.
    wanted = parse(f"${ground_truth}$") if "$" not in ground_truth and "\\boxed" not in ground_truth else parse(
        ground_truth)
    if not wanted:
        raise ValueError(f"math-verify: the ground truth {ground_truth!r} is no expression")
    text = visible_text(prompt, completion)
    return float(text is not None and verify(wanted, parse(text)))
