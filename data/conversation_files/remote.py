"""Files on object stores and web servers, read through fsspec (`s3://`, `gs://`, `https://`, `msc://`), with a cache.

The cache is a folder on the node's disk that all processes share. Files of records stay there, because the whole run
reads them. Images are deleted, the least recently read first, when they take more than the limit. A file gets its name
when it is complete, so a killed process leaves at most a partial file, which a later process deletes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://")
GIB = 1 << 30
# Properties of a file that change with its content. Each kind of store has other names for them.
VERSION_KEYS = ("size", "ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "md5Hash")
GONE = (404, 410)
RETRIES = 5
# Part of the limit that a process writes before it checks the size of the whole cache. A node may have a hundred
# processes, and each of them may exceed the limit by this much.
SWEEP_PART = 0.002
# Part of the limit that is in use after files were deleted.
KEPT_PART = 0.9
PARTIAL = ".partial"
# Age of a partial file that no process writes any more.
PARTIAL_S = 3600.0


def is_url(name: str) -> bool:
    """Return whether a name is the URL of a remote file."""
    return URL.match(name) is not None


def joined(base: str | Path, name: str) -> str:
    """Return a name relative to a folder or URL as a path or URL. An absolute name is returned unchanged."""
    if is_url(name):
        return name
    return f"{str(base).rstrip('/')}/{name}" if is_url(str(base)) else str(Path(base) / name)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-hetero"


@dataclass
class Cache:
    """A cache of remote files; see the docstring of this module.

    Attributes:
        folder: the folder, on a disk of this node.
        max_bytes: approximate limit for the bytes of images.
    """

    folder: Path
    max_bytes: int
    _written: int = field(default=0, repr=False)

    def record_file(self, url: str) -> Path:
        """Return the local copy of a file of records. A file that has changed at its place is copied again.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the store or the disk fails.
        """
        found = _described(url)
        version = json.dumps([url, *(str(found.get(key)) for key in VERSION_KEYS)])
        path = self.folder / "files" / _digest(version) / url.rpartition("/")[2]
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent / ".lock"):
                if not path.is_file():
                    partial = path.with_name(f"{path.name}{PARTIAL}")
                    _retried(url, lambda system, name: system.get_file(name, str(partial)))
                    partial.replace(path)
        return path

    def image(self, url: str) -> bytes:
        """Return the content of an image. Raises FileNotFoundError, or OSError if the store or the disk fails."""
        name = _digest(url)
        path = self.folder / "images" / name[:2] / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = bytes(_retried(url, lambda system, place: system.cat_file(place)))
            self._keep(path, data)
            return data
        try:
            os.utime(path)  # read now
        except FileNotFoundError:
            pass  # another process has deleted it since
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(suffix=PARTIAL, dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
        self._written += len(data)
        if self._written >= SWEEP_PART * self.max_bytes:
            self._written = 0
            self._sweep()

    def _sweep(self) -> None:
        """Delete the images that were read least recently, unless another process is doing so."""
        with _locked(self.folder / ".lock", wait=False) as is_ours:
            if not is_ours:
                return
            found = []
            for folder in os.scandir(self.folder / "images"):
                for entry in os.scandir(folder.path):
                    try:
                        status = entry.stat()
                        if not entry.name.endswith(PARTIAL):
                            found.append((status.st_mtime, status.st_size, entry.path))
                        elif time.time() - status.st_mtime > PARTIAL_S:
                            os.unlink(entry.path)
                    except FileNotFoundError:
                        continue  # a partial file that is complete now
            used = sum(size for _, size, _ in found)
            if used <= self.max_bytes:
                return
            for _, size, path in sorted(found):
                os.unlink(path)
                used -= size
                if used <= KEPT_PART * self.max_bytes:
                    return


class _locked:
    """Lock between the processes of a node, which ends with its process. Its context says whether it was taken."""

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        self._path, self._mode = path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)

    def __enter__(self) -> bool:
        self._file = self._path.open("ab")
        try:
            fcntl.flock(self._file, self._mode)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._file.close()


def names_in(folder: str, subfolders: Sequence[str]) -> Iterator[str]:
    """Yield the files of a folder of a store and of some of its subfolders, relative to it.

    Raises:
        ValueError: there is no such folder, or the store cannot list it.
        OSError: the store fails.
    """
    if folder.startswith(("http://", "https://")):
        raise ValueError("a web server does not list folders; name a file, or several in a YAML file")
    base = folder.rstrip("/")
    for place in ("", *(f"{name}/" for name in subfolders)):
        try:
            entries = _retried(f"{base}/{place}", lambda system, name: system.ls(name, detail=True))
        except FileNotFoundError as error:
            if not place:
                raise ValueError("does not exist") from error
            continue
        yield from (place + entry["name"].rstrip("/").rpartition("/")[2] for entry in entries
                    if entry["type"] == "file")


def _described(url: str) -> dict[str, Any]:
    return dict(_retried(url, lambda system, name: system.info(name)))


def _retried(url: str, read: Callable[[Any, str], Any]) -> Any:
    """Read from the file system of a URL, with further attempts after errors that may be temporary.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: every attempt failed; the message names the URL.
    """
    import aiohttp
    import fsspec
    from botocore.exceptions import BotoCoreError
    from multistorageclient.types import RetryableError

    for attempt in range(RETRIES):
        try:
            system, name = fsspec.core.url_to_fs(url)
            return read(system, name)
        except (ImportError, ValueError) as error:
            raise OSError(f"{url}: fsspec cannot read it: {error}") from error
        except (OSError, aiohttp.ClientError, BotoCoreError, RetryableError, RuntimeError) as error:
            # fsspec's file system for HTTP raises FileNotFoundError for every failure.
            cause = error.__cause__
            is_missing = not isinstance(cause, aiohttp.ClientError) or (
                isinstance(cause, aiohttp.ClientResponseError) and cause.status in GONE)
            if isinstance(error, FileNotFoundError) and is_missing:
                raise
            if attempt + 1 == RETRIES or isinstance(error, PermissionError):
                raise OSError(f"{url}: {type(error).__name__}: {error}") from error
            time.sleep(0.5 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
