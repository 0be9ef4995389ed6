"""Protocol of rewards: any callable of this form plugs in by name (`--reward NAME` or `pkg.module:fn`).

The built-in rewards score only what a reasoning model says after its thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

OPEN, CLOSE = "<think>", "</think>"
_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


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


def visible_text(prompt: str, completion: str) -> str | None:
    """Return the completion without `<think>...</think>`; None if a block does not end, so that there is no answer.

    With templates that end with `<think>`, a completion begins inside a block. Everything before a `</think>` without
    a `<think>` is therefore left out, too.
    """
    text = OPEN + completion if prompt.rstrip().endswith(OPEN) else completion
    # A space takes the place of a block, so that digits on both sides of it do not become one number.
    text = _BLOCK.sub(" ", text).rpartition(CLOSE)[2]
    return None if OPEN in text else text
