r"""Rewards for short answers: exact text, the letter of a choice, or a mathematical expression.

Arguments are those of `mimo.rl.prompts.Reward`. Like all built-in rewards, these score only what a reasoning model says
after its thoughts, and leave out those of a ground truth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mimo.rl.rewards.expressions import compare

OPEN, CLOSE = "<think>", "</think>"
_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)
LETTERS = "ABCDEFGHIJ"

# Ordered from the clearest to the least clear. The last match of a pattern counts, because a model may weigh other
# choices first. Possessive quantifiers keep a search in long white space from taking quadratic time.
_PATTERNS = tuple(map(re.compile, (
    r"\\boxed\{\s*(?:\\(?:text(?:bf)?|math(?:bf|rm))\{\s*)?\(?([A-Za-z])(?![A-Za-z])",
    # A small letter must end the phrase: "the answer is a dog" chooses nothing, and neither does "Answer: I think".
    r"\b(?i:answer|choice|option)\b(?:\s++is)?\s*+[:=]?[\s*\\(]*+"
    r"((?!I\s+[a-z])[A-J](?![\w'])|[a-j](?=\s*(?:[.,;:)*]|\n|$)))",
    r"\(([A-J])\)",
    r"(?:^|\n)[^\S\n]*+(?:\*\*)?([A-J])(?:\*\*)?\s*(?:[.):]|\n|$)",
    r"(?<![\w'])([A-J])[\s.*)]*$",
)))
# Tags, code marks, quotation marks and dollar signs around a letter mean nothing.
_AROUND = re.compile(r"</?[A-Za-z][\w-]{0,30}>|[`$\"]")


def visible_text(prompt: str, completion: str) -> str | None:
    """Return the completion without `<think>...</think>`; None if a block does not end, so that there is no answer.

    With templates that end with `<think>`, a completion begins inside a block. Everything before a `</think>` without
    a `<think>` is therefore left out, too.
    """
    text = OPEN + completion if prompt.rstrip().endswith(OPEN) else completion
    # A space takes the place of a block, so that digits on both sides of it do not become one number.
    text = _BLOCK.sub(" ", text).rpartition(CLOSE)[2]
    return None if OPEN in text else text


def visible_truth(ground_truth: str) -> str:
    """Return the ground truth without `<think>...</think>`, which data sets of reasoning have, too."""
    return visible_text("", ground_truth) or ""


def exact_match(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion without `<think>...</think>` equals the ground truth, else 0.0.

    White space around both is ignored, and any white space inside counts as one space. Case and punctuation matter.

    Raises:
        ValueError: the ground truth is empty.
    """
    wanted = visible_truth(ground_truth).split()
    if not wanted:
        raise ValueError("exact-match: the ground truth is empty")
    text = visible_text(prompt, completion)
    return float(text is not None and text.split() == wanted)


def math_verify(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the completion's expression equals the ground truth's, in LaTeX or plain, else 0.0.

    The package math-verify takes the answer from `\boxed{}`, `$...$` or plain text. An expression that takes longer
    than `mimo.rl.rewards.expressions.LIMIT_S` to read or to compare counts as wrong.

    Raises:
        ValueError: the ground truth is not an expression.
    """
    # math-verify reads bare LaTeX only between dollar signs.
    truth = visible_truth(ground_truth).strip()
    wanted = truth if "$" in truth or "\\boxed" in truth else f"${truth}$"
    text = visible_text(prompt, completion)
    result = compare(wanted, text or "")
    if not result.known:
        raise ValueError(f"math-verify: the ground truth {ground_truth!r} is no expression")
    return float(text is not None and result.equal)


def multiple_choice(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion without `<think>...</think>` chooses the ground truth's letter, else 0.0.

    The ground truth is a letter from A to J, in brackets or not. `metadata` may have `num_choices`, the number of
    letters to choose from.

    Raises:
        ValueError: the ground truth is not one of these letters.
    """
    letters = LETTERS[: metadata.get("num_choices", len(LETTERS))]
    wanted = visible_truth(ground_truth).strip().strip("().").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise ValueError(f"multiple-choice: the ground truth {ground_truth!r} is not a letter of {letters!r}")
    text = visible_text(prompt, completion)
    return float(text is not None and choice(text, letters) == wanted)


def choice(text: str, letters: str = LETTERS) -> str | None:
    r"""Return the letter that a text chooses; None if it chooses none of `letters`.

    In order of clarity: `\boxed{B}`; `answer is B`, `Answer: (B)`, `option B`; `(B)`; a line `B.`, `B)` or `B`; a
    capital letter at the end. A small letter counts only in a box, or after `answer` if it ends the phrase.
    """
    text = _AROUND.sub(" ", text)
    for pattern in _PATTERNS:
        found = [match[1].upper() for match in pattern.finditer(text)]
        chosen = [letter for letter in found if letter in letters]
        if chosen:
            return chosen[-1]
    return None
