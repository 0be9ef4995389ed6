"""Multiple choice: the answer is a letter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mimo.rl.rewards.protocol import visible_text

LETTERS = "ABCDEFGHIJ"

# Ordered from the clearest to the least clear. The last match of a pattern counts, because a model may weigh other
# choices first.
_PATTERNS = tuple(map(re.compile, (
    r"\\boxed\{\s*(?:\\text(?:bf)?\{\s*)?\(?([A-Za-z])(?![A-Za-z])",
    # A small letter must end the phrase: "the answer is a dog" chooses nothing.
    r"\b(?i:answer|choice|option)\b(?:\s+is)?\s*[:=]?[\s*\\(]*([A-J](?![\w'])|[a-j](?=\s*(?:[.,;:)*]|\n|$)))",
    r"\(([A-J])\)",
    r"(?:^|\n)\s*(?:\*\*)?([A-J])(?:\*\*)?\s*(?:[.):]|\n|$)",
    r"(?<![\w'])([A-J])[\s.*)]*$",
)))


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion without `<think>...</think>` chooses the ground truth's letter, else 0.0.

    Args:
        prompt: shows whether the completion begins inside a `<think>` block.
        completion: the model's text.
        ground_truth: a letter from A to J, in brackets or not.
        metadata: may have `num_choices`, the number of letters to choose from.

    Raises:
        ValueError: the ground truth is not one of these letters.
    """
    letters = LETTERS[: metadata.get("num_choices", len(LETTERS))]
    wanted = ground_truth.strip().strip("().").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise ValueError(f"multiple-choice: the ground truth {ground_truth!r} is not a letter of {letters!r}")
    text = visible_text(prompt, completion)
    return float(text is not None and choice(text, letters) == wanted)


def choice(text: str, letters: str = LETTERS) -> str | None:
    r"""Return the letter that a text chooses; None if it chooses none of `letters`.

    In order of clarity: `\boxed{B}`; `answer is B`, `Answer: (B)`, `option B`; `(B)`; a line `B.`, `B)` or `B`; a
    capital letter at the end. A small letter counts only in a box, or after `answer` if it ends the phrase.
    """
    for pattern in _PATTERNS:
        found = [match[1].upper() for match in pattern.finditer(text)]
        chosen = [letter for letter in found if letter in letters]
        if chosen:
            return chosen[-1]
    return None
