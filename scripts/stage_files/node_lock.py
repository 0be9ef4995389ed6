"""A file lock for one process of a node at a time. It ends with its holder, whose result the others read."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from stage_files.children import StageError

NAME = ".stage.lock"
POLL_S = 0.2


class NodeLock:
    """The lock of a folder on a node's own disk.

    Args:
        folder: an existing folder.
        request: what this process wants to do. If it waits for another one with the same request, it takes its result.

    Raises:
        StageError: the folder's file system has no locks, or the file cannot be opened.
    """

    def __init__(self, folder: Path, request: str) -> None:
        self._path, self._request = folder / NAME, request
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StageError(f"{self._path}: {error.strerror}") from error

    def __enter__(self) -> NodeLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self._file)

    def acquire(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Wait for the lock.

        Returns:
            The result that the other process left with `finish`, if it had the same request. None if this process
            has to do the work, which includes that the other one ended without a result.
        """
        began, waited = time.time(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    say(f"process {self._read().get('pid', '?')} of this node stages into {self._path.parent}: waiting")
                waited = True
                time.sleep(POLL_S)
            except OSError as error:
                raise StageError(f"{self._path} cannot be locked: {error.strerror}; --to must be on a disk of the "
                                 "node") from error
        record = self._read()
        if waited and record.get("request") == self._request and record.get("ended", 0.0) >= began:
            return record
        self._write({"pid": os.getpid()})
        return None

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result of the work for the processes that wait."""
        self._write({"pid": os.getpid(), "request": self._request, "ended": time.time(), **result})

    def _read(self) -> dict[str, Any]:
        """Read what the last holder wrote. Empty while it is writing."""
        try:
            found = json.loads(os.pread(self._file, 1 << 20, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
