"""Worker processes that the modules of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.spawn import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    """Four processes: their start, with the import of Megatron, takes longer than most calls. A failure renews them."""
    pool = WorkerPool(4)
    yield pool
    pool.close()
