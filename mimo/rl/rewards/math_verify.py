"""Mathematical answers compared as expressions, by the package math-verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.rl.rewards.expressions import compare
from mimo.rl.rewards.protocol import visible_text


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the completion's expression equals the ground truth's, else 0.0.

    The package takes the answer from `\boxed{}`, `$...$` or plain text. An expression that takes longer than
    `mimo.rl.rewards.expressions.LIMIT_S` to read or to compare counts as wrong.

    Args:
        prompt: shows whether the completion begins inside a `<think>` block.
        completion: the model's text.
        ground_truth: an expression, in LaTeX or plain.
        metadata: not used.

    Raises:
        ValueError: the ground truth is not an expression.
    """
    # math-verify reads bare LaTeX only between dollar signs.
    wanted = ground_truth if "$" in ground_truth or "\\boxed" in ground_truth else f"${ground_truth}$"
    text = visible_text(prompt, completion)
    result = compare(wanted, text or "")
    if not result.known:
        raise ValueError(f"math-verify: the ground truth {ground_truth!r} is no expression")
    return float(text is not None and result.equal)
