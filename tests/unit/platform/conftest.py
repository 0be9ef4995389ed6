import contextlib

import pytest

from tests.support.spawn import WorkerPool


@pytest.fixture(scope="module")
def pool():
    """Two processes on the CPU platform."""
    with contextlib.closing(WorkerPool(2)) as pool:
        yield pool
