"""Settings for all tests. A test is in the fast suite unless it is marked `slow` (or `gpu`)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.spawn import WorkerPool

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu do without
    from hypothesis import settings

    # An example may take longer than 200 ms where the machine is busy, which is no reason to fail.
    settings.register_profile("unhurried", settings(), deadline=None)
    settings.load_profile("unhurried")

# Tests start hundreds of Python processes. Without bytecode, each of them compiles its part of 15,000 files of PyTorch,
# Megatron Core and vLLM again, which doubles the time of its start. Where the environment forbids bytecode beside the
# source, as images of containers often do, it is kept apart.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

_pool = WorkerPool(4)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four processes that start when they are first needed. A failure renews them."""
    yield _pool
    _pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests take longest, so that at the end no process waits long for the other one.

    A long test has a limit of its own. Files of a folder stay together, because they share the pool.
    """
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), marker.args[0] if marker is not None else 0.0)
    items.sort(key=lambda item: (item.path.parent.name != "e2e", -limits[item.path]
                                 if item.path.parent.name == "e2e" else 0.0))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes behind each folder's last test; idle, their many groups would take time from what follows."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pool.close()
