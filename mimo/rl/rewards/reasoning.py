"""Separates a reasoning model's answer from its thoughts."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


def visible_text(prompt: str, completion: str) -> str | None:
    """Return the completion without `<think>...</think>`; None if a block does not end, so that there is no answer.

    With templates that end with `<think>`, a completion begins inside a block. Everything before a `</think>` without
    a `<think>` is therefore left out, too.
    """
    text = OPEN + completion if prompt.rstrip().endswith(OPEN) else completion
    # A space takes the place of a block, so that digits on both sides of it do not become one number.
    text = _BLOCK.sub(" ", text).rpartition(CLOSE)[2]
    return None if OPEN in text else text
