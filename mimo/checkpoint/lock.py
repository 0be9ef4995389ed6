"""Lock of a folder of checkpoints, into which one run at a time saves. Nobody has to clean up after a killed run.

Three things show whether the run that a lock file names still lives. Its lock on the file ends with its process, also
across machines if the file system has such locks. On the same machine, the process can be looked up. On other machines,
the file's time decides: the run renews it every few seconds, and a lock that is not renewed for a while is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

LOCK = ".lock"
# Seconds between renewals. A holder on another machine that has not renewed its file for STALE_S is taken for dead.
RENEW_S = 5.0
STALE_S = 30.0
# Largest difference between clocks of machines, which matters if the file system takes times from the machines.
SKEW_S = 3600.0
# Seconds for which a process that was just killed may keep its lock.
ENDING_S = 5.0
# Seconds for which the server of a network file system may keep the lock of a machine that went down.
LEASE_S = 120.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Seconds by which two readings of a process's start may differ.
_CLOCK_S = 5.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: name of its machine.
        machine: identity of the boot and of the PID namespace in which `pid` is valid.
        pid: process number.
        started_unix_s: start of the process.
    """

    host: str
    machine: str
    pid: int
    started_unix_s: float

    @classmethod
    def current(cls) -> Holder:
        boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        machine = f"{boot.read_text().strip()} {space.readlink()}" if boot.exists() and space.is_symlink() else ""
        return cls(socket.gethostname(), machine or socket.gethostname(), os.getpid(),
                   psutil.Process().create_time())

    def is_same(self, other: Holder) -> bool:
        """Whether both are the same process."""
        return (self.machine, self.pid) == (other.machine, other.pid) and (
            abs(self.started_unix_s - other.started_unix_s) < _CLOCK_S)

    def lives_here(self) -> bool:
        """Whether the process, which ran on this machine, still runs."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and (
                abs(process.create_time() - self.started_unix_s) < _CLOCK_S)
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # another user's process, and /proc hides those
            return True

    def __str__(self) -> str:
        started = datetime.fromtimestamp(self.started_unix_s, UTC).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}, started {started}"


class FolderLock:
    """The lock of a folder of checkpoints, held from construction to `release` or the end of the process.

    Args:
        root: the folder, which must exist.

    Raises:
        ValueError: another run holds the lock; names its process.
        OSError: the lock file cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK
        self._me = Holder.current()
        self._released = threading.Event()
        # The file is watched before it is locked, because closing a file gives up all locks of the process on it.
        holder = self._read()
        if holder is not None and self._lives(holder):
            raise ValueError(self._refusal(holder))
        is_elsewhere = holder is not None and holder.machine != self._me.machine
        self._file = self._locked(LEASE_S if is_elsewhere else ENDING_S)
        found = _parsed(os.pread(self._file, 4096, 0))
        if found is not None and found != holder and not found.is_same(self._me):
            os.close(self._file)
            raise ValueError(self._refusal(found))  # another run was faster
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(self._me)).encode(), 0)
        os.fsync(self._file)
        self._thread = threading.Thread(target=self._renew, name="checkpoint lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let other runs save into the folder. In a fork of the process, such as a loader's worker, do nothing."""
        if not self._released.is_set() and os.getpid() == self._me.pid:
            self._released.set()
            self._thread.join()
            try:
                holder = self._read()
                # On a file system without locks, another run may have taken over the folder of one that stood still.
                if holder is not None and holder.is_same(self._me):
                    self._path.unlink(missing_ok=True)
                os.close(self._file)
            except OSError as error:
                # The run is over, and the next one finds out that this process has ended.
                logger.warning("--save %s: its lock cannot be removed: %s", self._path.parent, error)

    def _read(self) -> Holder | None:
        try:
            return _parsed(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def _lives(self, holder: Holder) -> bool:
        """Whether the run that the file names still lives. This may take STALE_S."""
        if holder.is_same(self._me):
            return False  # an earlier run of this process
        if holder.machine == self._me.machine:
            ends = time.monotonic() + ENDING_S
            while holder.lives_here() and time.monotonic() < ends:
                time.sleep(0.1)
            return holder.lives_here()
        # Both times are from the file system's clock. Some file systems use the machines' clocks, so that the age of a
        # file may be wrong or negative.
        probe = self._path.with_name(f"{LOCK}.{self._me.host}.{self._me.pid}")
        probe.write_bytes(b"")
        now = probe.stat().st_mtime_ns
        probe.unlink()
        try:
            seen = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        age_s = (now - seen) / 1e9
        wait_s = 0.0 if age_s > SKEW_S else min(max(STALE_S - age_s, 2 * RENEW_S), STALE_S)
        if wait_s > 0:
            logger.warning("--save %s: its lock is that of %s; waiting for up to %.0f s to see whether that run still "
                           "lives", self._path.parent, holder, wait_s)
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends:
            time.sleep(min(RENEW_S, STALE_S) / 10)
            try:
                file = self._path.open("rb")  # which makes a network file system look
            except FileNotFoundError:
                return False
            with file:
                if os.fstat(file.fileno()).st_mtime_ns != seen:
                    return True
        return False

    def _locked(self, patience_s: float) -> int:
        """Open the file and lock it, if its file system has locks. Wait for another holder for up to `patience_s`."""
        ends, has_warned = time.monotonic() + patience_s, False
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                    return file
                # Its last holder has just removed it.
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return file
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    os.close(file)
                    raise
                if time.monotonic() > ends:
                    holder = _parsed(os.pread(file, 4096, 0))
                    os.close(file)
                    raise ValueError(self._refusal(holder)) from error
                if patience_s > ENDING_S and not has_warned:
                    has_warned = True
                    logger.warning("--save %s: the file system still holds the lock of a run that has not renewed it; "
                                   "waiting for up to %.0f s", self._path.parent, patience_s)
            os.close(file)
            time.sleep(0.1)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            try:
                os.utime(self._file)
            except OSError:
                # If the disk does not come back, the next save reports it.
                continue

    def _refusal(self, holder: Holder | None) -> str:
        hint = ""
        if holder is not None and holder.machine != self._me.machine:
            hint = f". If its machine is gone for good, remove {self._path}"
        return (f"--save {self._path.parent}: another run saves there ({holder or 'its lock is held'}). Two runs would "
                f"overwrite each other's checkpoints: give --save another folder, or end that run first{hint}")


def _parsed(content: bytes) -> Holder | None:
    """Return the holder that a lock file names; None for an empty file, or one that was cut off as it was written."""
    try:
        values = json.loads(content)
        return Holder(str(values["host"]), str(values["machine"]), int(values["pid"]), float(values["started_unix_s"]))
    except (ValueError, KeyError, TypeError):
        return None
