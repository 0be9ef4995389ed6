"""The live engine that tests of the refit share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mimo.rollout.process import EngineProcess
from tests.support import refit
from tests.support.spawn import WorkerPool


@pytest.fixture(scope="module")
def live_engine(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, EngineProcess]]:
    """Folder of a saved mixture of experts, and vLLM itself with made-up weights of it."""
    folder = tmp_path_factory.mktemp("refit-qwen3-moe")
    pool.run(refit.save, "refit-qwen3-moe", str(folder), world_size=1)
    process = EngineProcess(refit.engine_options(folder))
    yield str(folder), process
    process.close()
