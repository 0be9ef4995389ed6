"""Which cases of a parametrized test only the slow suite runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(
    quick: Callable[..., bool], cases: Iterable[Any], *, name: Callable[..., str] | None = None
) -> list[Any]:
    """The cases as pytest parameters, those that are not quick marked slow.

    Args:
        quick: told a case's values.
        cases: tuples of values, or single ones.
        name: gives a case's id.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if quick(*values) else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks, id=None if name is None else name(*values)))
    return found
