"""Processes that save until they are killed, one after the other, and what each leaves for the next."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mimo.checkpoint import paths

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
