"""GSM8K: word problems whose answer is a number, `#### 72` in the data set (arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from mimo.rl.rewards.reasoning import visible_text

# Both are linear in the length of the text: an untrained policy writes thousands of dots.
_STRICT = re.compile(r"####[ \t*]*([-+]?\$?[-+]?[0-9.,]+)")
# A minus that follows a digit, a letter or a bracket is a hyphen or a difference, not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-+])?\$?(?:(?<=\$)[-+])?[0-9.,]+")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """1.0 where the completion's number is the ground truth's, else 0.0.

    The completion's number is that of its last `#### <number>` outside of `<think>...</think>`, or else its last
    number. `$`, thousands separators and decimals do not matter: `$1,234.00` is 1234.

    Args:
        prompt: the problem.
        completion: the model's text.
        ground_truth: a number, or an answer of the data set that ends with `#### <number>`.
        metadata: no effect.

    Raises:
        ValueError: the ground truth has no number.
    """
    wanted = answer(ground_truth)
    if wanted is None:
        raise ValueError(f"gsm8k: the ground truth {ground_truth!r} has no number")
    text = visible_text(prompt, completion)
    return float(text is not None and answer(text) == wanted)


def answer(text: str) -> Decimal | None:
    """The number after the last `####`, else the last number; None where there is none.

    What follows `####` is the answer even where it cannot be read as a number, as `1.2.3`: there is none then.
    """
    text = text.translate(_MINUS)
    strict = [match[1] for match in _STRICT.finditer(text) if _has_digit(match[1])]
    if strict:
        return to_number(strict[-1])
    numbers = (to_number(match[0]) for match in reversed(list(_NUMBER.finditer(text))))
    return next((number for number in numbers if number is not None), None)


def to_number(text: str) -> Decimal | None:
    """`-$1,234.00` as -1234; None for what is no number. Points and commas at the end belong to the sentence."""
    try:
        return Decimal(text.replace("$", "").replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)
