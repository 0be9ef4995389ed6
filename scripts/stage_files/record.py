"""Files that staging keeps in its folder: the record of what has been staged, and a lock.

The lock lets one process of a node stage at a time. It is released when its holder ends, whose result the others read.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stage_files.children import StageError

RECORD = ".staged.json"
VERSION = 1
LOCK = ".stage.lock"
POLL_S = 0.2


@dataclass(frozen=True)
class Recorded:
    """A file that was copied.

    Attributes:
        size: bytes.
        mtime_ns: time of the last change, of the source and of the copy.
        sha256: checksum of the source as it was read; None if it was not read here.
    """

    size: int
    mtime_ns: int
    sha256: str | None = None

    def is_at(self, path: Path) -> bool:
        """Whether a file with this size and time is there. Its content is not compared."""
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return path.is_file() and (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass
class StagedSource:
    """The files of one source.

    Attributes:
        source: their source, with the revision for the Hugging Face Hub.
        include: the requested patterns, which only a download needs.
        files: records by name relative to the copy ("" if the source is a file).
    """

    source: str
    include: list[str] = field(default_factory=list)
    files: dict[str, Recorded] = field(default_factory=dict)


def load(folder: Path) -> dict[str, StagedSource]:
    """Load the staged sources by name; empty if nothing was staged. Raises StageError for a damaged record."""
    path = folder / RECORD
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION:
            raise StageError(f"{path} is of version {stored['version']}, this program writes {VERSION}; delete it")
        return {name: StagedSource(place["source"], place["include"],
                            {file: Recorded(**values) for file, values in place["files"].items()})
                for name, place in stored["places"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(f"{path} is damaged ({error}); delete it: what is there is not copied again") from error


def save(folder: Path, places: dict[str, StagedSource]) -> None:
    """Write the record. A crash leaves either the old or the new one."""
    path, temporary = folder / RECORD, folder / f"{RECORD}.new"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({"version": VERSION, "places": {name: asdict(place) for name, place in places.items()}}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


class NodeLock:
    """The lock of a folder on a node's own disk.

    Args:
        folder: an existing folder.
        request: description of the work. A process that waits for one with the same request takes its result.

    Raises:
        StageError: the folder's file system has no locks, or the file cannot be opened.
    """

    def __init__(self, folder: Path, request: str) -> None:
        self._path, self._request = folder / LOCK, request
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StageError(f"{self._path}: {error.strerror}") from error

    def __enter__(self) -> NodeLock:
        return self

    def __exit__(self, *_: object) -> None:
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
