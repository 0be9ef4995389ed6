"""Marks for parametrized tests of which the fast suite runs a part."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def fast_only(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as pytest parameters, with all but the fast ones marked slow.

    Args:
        fast: The cases that the fast suite runs.
        cases: Tuples of values, or single values.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
