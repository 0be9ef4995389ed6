"""Protocol of rewards: any callable of this form plugs in by name (`--reward NAME` or `pkg.module:fn`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Reward(Protocol):
    """Scores one completion."""

    def __call__(self, prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        """Return the score, a finite number. The built-in rewards return 1.0 for a right answer and 0.0 for any other.

        Args:
            prompt: text of the prompt, chat template included.
            completion: text that the model wrote, without special tokens at its end.
            ground_truth: the data set's answer.
            metadata: the data set's other fields of the sample, and `finish_reason`, which is `stop`, or `length` if
                the length limit cut the completion off.

        Raises:
            ValueError: the ground truth or the metadata cannot be scored against. No completion raises an error.
        """
        ...
