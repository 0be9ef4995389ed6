"""Protocol of rewards: any callable of this form plugs in by name (`--reward NAME` or `pkg.module:fn`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Reward(Protocol):
    """Scores one completion."""

    def __call__(self, prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        """The score, a finite number; the built-in rewards give 1.0 for a right answer and 0.0 for any other.

        Args:
            prompt: text that the model went on from, chat template included.
            completion: text that it wrote, without special tokens of the end.
            ground_truth: the data set's answer.
            metadata: the data set's other fields of the sample, and `finish_reason`: `stop`, or `length` where the
                length limit cut the completion off.

        Raises:
            ValueError: the ground truth or the metadata cannot be scored against; a completion never raises.
        """
        ...
