"""Modules that take long to import, for tests whose collection does without them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


class Lazy:
    """A module that is imported when one of its attributes is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


@dataclass(frozen=True)
class Rank:
    """The place of a vLLM worker; here so that parametrized tests name it without importing vLLM.

    Attributes:
        tp: Tensor-parallel rank and size.
        pp: Pipeline rank and size.
        experts_over_tp: Whether each tensor-parallel rank holds whole experts.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    experts_over_tp: bool = False
