import contextlib

import pytest

from tests.support.spawn import WorkerPool


@pytest.fixture(scope="session")
def pool():
    """Two processes on the CPU platform, shared by this folder's tests: importing Megatron is what takes time."""
    with contextlib.closing(WorkerPool(2)) as pool:
        yield pool
