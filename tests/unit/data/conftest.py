"""Data workers that start quickly."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def frozen_objects() -> Iterator[None]:
    """Hide the objects that are there from the workers which a test forks.

    Energon has each new worker look at every Python object for CUDA tensors, which takes three seconds in a process
    that has imported vLLM and Megatron Core. It passes over frozen objects.
    """
    gc.freeze()
    yield
    gc.unfreeze()
