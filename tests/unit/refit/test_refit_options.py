"""Options of a refit."""

from __future__ import annotations

import pytest

from mimo.refit.options import RefitOptions


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    """Bug 31: a typo that is found late, by some ranks only, is a deadlock."""
    with pytest.raises(ValueError) as error:
        RefitOptions(backend="ucx", dtype="bf16", route="fast", chunk_bytes=0, timeout_s=-1)
    assert str(error.value) == (
        "refit backend 'ucx': known are gloo, nccl, ipc; "
        "refit dtype 'bf16': known are float32, bfloat16, float16, float64, float8_e4m3fn; "
        "refit route 'fast': known are auto, loader; "
        "refit chunk_bytes 0: must be positive; refit timeout_s -1: must be positive")
