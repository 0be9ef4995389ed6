"""Data workers that start quickly, and a tokenizer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def frozen_objects() -> Iterator[None]:
    """Hide the objects that are there from the workers which a test forks.

    Energon has each new worker look at every Python object for CUDA tensors, which takes three seconds in a process
    that has imported vLLM and Megatron Core. It passes over frozen objects.
    """
    gc.freeze()
    yield
    gc.unfreeze()
