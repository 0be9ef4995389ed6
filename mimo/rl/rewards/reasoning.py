"""Separates a reasoning model's answer from its thoughts."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


def visible_text(prompt: str, completion: str) -> str | None:
    """The completion without `<think>...</think>`; None where thinking does not end: then there is no answer.

    Templates that end with `<think>` leave the model only the end of the block to write, so a completion may begin
    inside of one: everything before a `</think>` of which the beginning is not there is thinking, too.
    """
    text = OPEN + completion if prompt.rstrip().endswith(OPEN) else completion
    # A space: what stood on both sides of a block must not become one number.
    text = _BLOCK.sub(" ", text).rpartition(CLOSE)[2]
    return None if OPEN in text else text
