"""The in-memory digits in the order in which shards were read: `tests.support.listed_digits:provider`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from data import digits
from data.indexed import IndexedStream
from mimo.protocols import Lane, Sample, TokenSpec

PREPARE_SEED = 0
"""The --seed of scripts/prepare_digits.py."""


@dataclass(frozen=True)
class Config(digits.Config):
    """Digits in a given order."""

    digits_order: str = ""
    """JSON file: for each lane, `[index, text only]` of its samples in order."""


@lru_cache(maxsize=1)
def read_order(path: str) -> list[list[tuple[int, bool]]]:
    return json.loads(Path(path).read_text())


class ListedDigits(digits.DigitsProvider):
    """See the module's text."""

    Config: ClassVar[type] = Config

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        order = read_order(config.digits_order)[lane.index]

        def build(index: int) -> Sample:
            number, text_only = order[(index - lane.index) // lane.count]
            plain = replace(config, digits_augment=False, digits_text_only_fraction=float(text_only))
            return digits.build_sample(plain, tokens, replace(lane, seed=PREPARE_SEED), number)

        return IndexedStream(lane, build)


provider = ListedDigits()
