"""Killed while it saves: every checkpoint that has its name is whole, and the next process goes on from the latest."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint import paths
from tests.support.spawn import forkserver_context

STARTS_WITHIN_S = 120.0
BESIDE_SHARDS = {"common.pt", "metadata.json", ".metadata", "checksums.json", "run_config.toml"}


def _keep_saving(*arguments: Any) -> None:
    # Imported in the new process alone: it puts the CPU platform in place.
    from tests.support.saving import keep_saving

    keep_saving(*arguments)


class Processes:
    """Starts saving processes one after the other, in one folder, and keeps what they have said.

    Attributes:
        published: the last iteration that a process or the tracker has called published.
    """

    def __init__(self, context: Any, folder: Path, async_save: bool) -> None:
        self._context, self.folder, self._async_save = context, folder, async_save
        self.published = 0

    def start(self, die_at: int | str | None = None) -> tuple[Any, Connection]:
        """A process that has checked all checkpoints and goes on from the latest."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=_keep_saving, args=(str(self.folder), self._async_save, die_at, there))
        process.start()
        there.close()
        if not here.poll(STARTS_WITHIN_S):
            process.kill()
            raise TimeoutError("no word from the process")
        loaded = here.recv()  # EOFError: a check has failed, and the process has said so
        assert loaded >= self.published, f"iteration {self.published} was published and is lost"
        return process, here

    def end(self, process: Any, connection: Connection) -> None:
        """Wait for the end of a process, and look at what it leaves."""
        process.join(STARTS_WITHIN_S)
        assert process.exitcode == -9
        while connection.poll():
            try:
                self.published = max(self.published, connection.recv())
            except EOFError:
                break
        connection.close()
        latest = int(paths.latest(self.folder) or 0)
        assert latest >= self.published
        self.published = latest
        for folder in self.folder.glob("iter_*"):
            assert {file.name for file in folder.iterdir()} >= BESIDE_SHARDS, f"{folder} is not complete"


pytestmark = pytest.mark.slow

NUM_KILLS = 20


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes that have imported everything: the import takes longer than a test."""
    return forkserver_context(["tests.support.saving"])


def kill_at_random(processes: Processes, generator: random.Random) -> bool:
    """Kill a process a random time after it has begun to write. Returns whether it was still writing."""
    process, connection = processes.start()
    for _ in range(generator.randrange(3)):
        processes.published = max(processes.published, connection.recv())
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not list(processes.folder.glob(".saving_*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    # A save of this model takes some 50 ms.
    time.sleep(generator.random() * 0.06)
    process.kill()
    processes.end(process, connection)
    return bool(list(processes.folder.glob(".saving_*")))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_killed_at_random_moments(context: Any, tmp_path: Path, async_save: bool) -> None:
    processes, generator = Processes(context, tmp_path, async_save), random.Random(7)
    interrupted = sum(kill_at_random(processes, generator) for _ in range(NUM_KILLS))
    assert interrupted >= NUM_KILLS // 4, "most kills missed the save"
    assert processes.published > 0


def kill_before(processes: Processes, change: int | str) -> None:
    process, connection = processes.start(die_at=change)
    processes.end(process, connection)


@pytest.mark.timeout(900)
def test_killed_before_any_change_of_a_file(context: Any, tmp_path: Path) -> None:
    """List the steps of two saves, of which the first replaces a checkpoint and the second deletes one."""
    processes = Processes(context, tmp_path, False)
    kill_before(processes, 100)
    assert processes.published >= 3
    for change in range(1, 45):
        kill_before(processes, change)


def test_killed_between_a_name_and_the_next(context: Any, tmp_path: Path) -> None:
    processes = Processes(context, tmp_path, True)
    kill_before(processes, 60)
    published = processes.published
    assert published >= 2
    kill_before(processes, "os.rename .saving")
    assert not paths.iteration_dir(tmp_path, published).exists(), "the one that is replaced has lost its name"
    surplus = f"os.remove .deleted_{paths.iteration_dir(tmp_path, published - 1).name}"
    for change in (".distcp", ".writing latest", "os.remove .deleted", surplus):
        kill_before(processes, change)
    assert processes.published > published
