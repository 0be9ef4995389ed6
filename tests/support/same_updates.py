"""Policy updates of several ranks against those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest

from mimo.rl.policy import PolicyResult
from tests.support.global_state import Piece, assemble, worst_errors

TOLERANCE = 1e-5


class Updated(Protocol):
    """Results on a rank: of each update, the parameters after them, the error of the last one."""

    results: list[PolicyResult]
    after: list[Piece]
    error: str


def assert_same_updates(expected: Updated, found: Sequence[Updated], num_microbatches: int) -> None:
    """Figures of every update and the parameters after them are the expected ones."""
    for outcome in found:
        assert not outcome.error
        for mine, wanted in zip(outcome.results, expected.results, strict=True):
            assert mine.num_microbatches == num_microbatches and mine.num_tokens == wanted.num_tokens
            assert mine.metrics == pytest.approx(wanted.metrics, rel=TOLERANCE, abs=TOLERANCE)
            assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=TOLERANCE)
    errors = worst_errors(assemble(expected.after), [outcome.after for outcome in found])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
