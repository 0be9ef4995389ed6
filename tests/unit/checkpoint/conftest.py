import contextlib
from collections.abc import Iterator

import pytest

from tests.support.spawn import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """A process on the CPU platform: modules that import Megatron are tested there."""
    with contextlib.closing(WorkerPool(1)) as pool:
        yield pool
