"""Child process of scripts/stage.py: it lists sources, copies files and computes checksums, one task a line on stdin.

A read from a file system that hangs cannot be interrupted. Here it blocks this process alone, which the parent kills
without waiting for it. The program needs only the standard library. Answers are lines of JSON on stdout: any number
that report progress, then one with `done` or with `error`.

rsync does not do the copying, because nodes and container images may lack it. It also records no checksum for --verify,
and if a read hangs, its exit code does not name the file.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

CHUNK_BYTES = 4 << 20
# Seconds between two lines about progress.
TELL_S = 0.2
# Most entries of a listing in one line.
BATCH = 500
PR_SET_PDEATHSIG = 1
PART = ".stage-{}.part"
OWN_NAMES = (".staged.json", ".stage.lock")
# Errors that another attempt would find again.
FINAL = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR, errno.EROFS,
         errno.ELOOP, errno.ENAMETOOLONG)


class Refusal(Exception):
    """A task cannot be done, and another attempt would not help."""


def is_part(name: str) -> bool:
    """Whether a file is an unfinished copy."""
    before, after = PART.split("{}")
    return name.startswith(before) and name.endswith(after)


# ---- listing ----

def list_source(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Report every folder and file of a source, links followed, as `[name, is a folder, size, mtime_ns, mode]`.

    Names are relative to the source. If the source is a file, its name is "".
    """
    source, batch, told = task["source"], [], time.monotonic()
    status = os.stat(source)
    is_folder = stat.S_ISDIR(status.st_mode)
    if is_folder and _is_hub_cache(source):
        raise Refusal(f"{source} is a Hugging Face cache of all revisions of a model; give the folder of one: "
                      f"{source}/snapshots/{sorted(os.listdir(f'{source}/snapshots'))[0]}")
    found = _walk(source, "", status, ()) if is_folder else iter([_entry(source, "", status)])
    for entry in found:
        batch.append(entry)
        if len(batch) == BATCH or time.monotonic() - told > TELL_S:
            tell(entries=batch)
            batch, told = [], time.monotonic()
    tell(entries=batch)
    return {"is_folder": is_folder, "real": os.path.realpath(source)}


def _is_hub_cache(folder: str) -> bool:
    return all(os.path.isdir(f"{folder}/{name}") for name in ("blobs", "refs", "snapshots")) and bool(
        os.listdir(f"{folder}/snapshots"))


def _walk(folder: str, relative: str, status: os.stat_result,
          around: tuple[tuple[int, int], ...]) -> Iterator[list[Any]]:
    yield _entry(folder, relative, status)
    around = (*around, (status.st_dev, status.st_ino))
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path, inner = f"{folder}/{name}", f"{relative}/{name}".lstrip("/")
        if is_part(name) or inner in OWN_NAMES:
            continue
        try:
            status = os.stat(path)
        except FileNotFoundError as error:
            if os.path.islink(path):
                raise Refusal(f"{path} is a link to {os.readlink(path)}, which is not there") from error
            raise
        if not stat.S_ISDIR(status.st_mode):
            yield _entry(path, inner, status)
        elif (status.st_dev, status.st_ino) in around:
            raise Refusal(f"{path} is a link to a folder that it lies in")
        else:
            yield from _walk(path, inner, status, around)


def _entry(path: str, relative: str, status: os.stat_result) -> list[Any]:
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO):
        raise Refusal(f"{path} is neither a file nor a folder")
    return [relative, kind == stat.S_IFDIR, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode)]


# ---- copying ----

def copy(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Copy a file to `part`, then rename it to `target`. Continues what an earlier process wrote to `part`.

    Every `block` bytes are synced to the disk before more are written. Of an earlier part, all but the last whole block
    are kept, because a node that lost power may never have written the rest.
    """
    size, block = task["size"], task["block"]
    source = os.open(task["source"], os.O_RDONLY)
    part = os.open(task["part"], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(part)
        kept = max(min(os.fstat(part).st_size, size) // block - 1, 0) * block
        os.ftruncate(part, kept)
        digest = hashlib.sha256()
        _read(part, digest.update, kept, tell, "kept")
        if kept:
            os.lseek(source, kept, os.SEEK_SET)
        written = _fill(task, source, part, kept, digest.update, tell)
        status = os.fstat(source)
        if written != size or (status.st_size, status.st_mtime_ns) != (size, task["mtime_ns"]):
            raise Refusal(f"{task['source']} changed while it was copied")
        # The copy has the permissions of the source, but its owner can always read it.
        os.fchmod(part, task["mode"] & 0o777 | 0o400)
        os.utime(part, ns=(task["mtime_ns"], task["mtime_ns"]))
        os.fsync(part)
        os.replace(task["part"], task["target"])
        _sync_folder(os.path.dirname(task["target"]))
    finally:
        os.close(part)
        os.close(source)
    return {"sha256": digest.hexdigest(), "kept": kept}


def _lock(part: int) -> None:
    """Wait until no other process writes the file. A killed process may live on in a call that hangs."""
    while True:
        try:
            return fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)


def _fill(task: dict[str, Any], source: int, part: int, written: int, digest: Callable[[bytes], None],
          tell: Teller) -> int:
    """Copy the rest of a file at `limit` bytes per second at most, and return the size of the part."""
    limit, block, began, first, synced = task["limit"], task["block"], time.monotonic(), written, written
    chunk_bytes = min(CHUNK_BYTES, block, max(int(limit * TELL_S), 1) if limit else CHUNK_BYTES)
    while chunk := os.read(source, chunk_bytes):
        digest(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(part, rest):]
        written += len(chunk)
        if written - synced >= block:
            os.fdatasync(part)
            synced = written
        tell.progress("bytes", len(chunk))
        if written > task["size"]:
            break
        if limit:
            time.sleep(max((written - first) / limit - (time.monotonic() - began), 0))
    return written


def _read(file: int, digest: Callable[[bytes], None], size: int, tell: Teller, name: str) -> None:
    """Read the next `size` bytes of a file."""
    while size > 0:
        chunk = os.read(file, min(CHUNK_BYTES, size))
        if not chunk:
            raise Refusal("a file became shorter while it was read")
        digest(chunk)
        size -= len(chunk)
        tell.progress(name, len(chunk))


def _sync_folder(folder: str) -> None:
    """Sync a folder, so that a new name in it is on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def checksum(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    digest, opened = hashlib.sha256(), os.open(task["source"], os.O_RDONLY)
    try:
        _read(opened, digest.update, os.fstat(opened).st_size, tell, "read")
    finally:
        os.close(opened)
    return {"sha256": digest.hexdigest()}


# ---- tasks ----

class Teller:
    """Writes answers to stdout."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._told = 0.0

    def __call__(self, **answer: Any) -> None:
        """Write a line. Ends this process if the parent is gone."""
        line = memoryview((json.dumps(answer) + "\n").encode())
        try:
            while line:
                line = line[os.write(1, line):]
        except BrokenPipeError:
            os._exit(1)

    def progress(self, name: str, count: int) -> None:
        """Count progress, and write a line from time to time."""
        self._counts[name] = self._counts.get(name, 0) + count
        if time.monotonic() - self._told >= TELL_S:
            self.flush()

    def flush(self) -> None:
        """Write a line with the progress since the last one."""
        if self._counts:
            self(**self._counts)
        self._counts, self._told = {}, time.monotonic()


def die_with(parent: int) -> None:
    """Make this process end with its parent, even in the middle of a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(tasks: dict[str, Callable[[dict[str, Any], Teller], dict[str, Any]]], description: str | None) -> None:
    """Run the tasks that stdin names, until it ends."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("parent", type=int, help="id of the process that starts this one, and with which it ends")
    die_with(parser.parse_args().parent)
    # Ctrl-C reaches all processes of a terminal, but the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell = Teller()
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = tasks[task["do"]](task, tell)
            tell.flush()
            tell(done=answer)
        except Refusal as error:
            tell(error=str(error), final=True)
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            tell(error=f"{name}{error.strerror or error}", final=error.errno in FINAL)


if __name__ == "__main__":
    serve({"list": list_source, "copy": copy, "checksum": checksum}, __doc__)
