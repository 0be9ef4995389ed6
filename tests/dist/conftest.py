"""Worker processes that the modules of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.spawn import WorkerPool

_open: list[WorkerPool] = []


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    """Four processes: their start, with the import of Megatron, takes longer than most calls. A failure renews them."""
    _open.append(WorkerPool(4))
    yield _open[-1]
    close_pools()


def close_pools() -> None:
    """End the processes."""
    while _open:
        _open.pop().close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the pool behind the folder's last test; idle, its many groups would take time from the tests that follow.

    Pytest ends the package's fixture with the session only.
    """
    if nextitem is None or not nextitem.path.is_relative_to(item.config.rootpath / "tests" / "dist"):
        close_pools()
