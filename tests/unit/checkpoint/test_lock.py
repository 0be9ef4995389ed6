"""Two runs never save into one folder, and a run that was killed is never in the way of the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mimo.checkpoint import lock
from mimo.checkpoint.lock import LOCK, FolderLock, Holder

HOLD = ("import os, sys, time\nfrom pathlib import Path\nfrom mimo.checkpoint.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\n"
        # A loader's worker outlives the run for a moment.
        "if sys.argv[2:] and not os.fork():\n    time.sleep(5)\n    os._exit(0)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(1000)\n")


@contextmanager
def another_run(root: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(root), *more], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(process.pid)
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    monkeypatch.setattr(lock, "STALE_S", 0.8)
    monkeypatch.setattr(lock, "ENDING_S", 0.5)


def elsewhere(root: Path) -> None:
    """Leave a lock file as a run on another machine writes it."""
    holder = replace(Holder.current(), host="node7", machine="another boot", pid=12)
    (root / LOCK).write_text(json.dumps(asdict(holder)))


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, monkeypatch, *, has_locks):
    if not has_locks:
        def refuse(*_: object) -> None:
            raise OSError(lock.errno.ENOLCK, "no locks available")

        monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    with another_run(tmp_path, "and", "fork") as process:
        with pytest.raises(ValueError, match=f"--save {tmp_path}: another run saves there .process {process.pid} on "):
            FolderLock(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        FolderLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_released_lock_is_free_and_a_process_may_take_its_own_again(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    FolderLock(tmp_path).release()
    first.release()
    with another_run(tmp_path) as process, pytest.raises(ValueError, match=str(process.pid)):
        FolderLock(tmp_path)


def test_a_lock_of_another_machine_counts_as_long_as_it_is_renewed(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.1):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(ValueError, match="another run saves there .process 12 on node7, started "):
        FolderLock(tmp_path)
    ended.set()
    thread.join()
    held = FolderLock(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    before = (tmp_path / LOCK).stat().st_mtime_ns
    deadline = time.monotonic() + 20
    while (tmp_path / LOCK).stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / LOCK).stat().st_mtime_ns > before, "it is not renewed"
    held.release()


def test_an_old_lock_of_another_machine_is_taken_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_S", 1000.0)
    elsewhere(tmp_path)
    os.utime(tmp_path / LOCK, (1, 1))
    FolderLock(tmp_path).release()
    (tmp_path / LOCK).write_text('{"host": "cut of')
    FolderLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_wrong_neither_kills_a_run_nor_blocks_the_next(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    os.utime(tmp_path / LOCK, (time.time() + 1000,) * 2)  # its clock was ahead
    FolderLock(tmp_path).release()
    elsewhere(tmp_path)
    ended = threading.Event()

    def renew_by_a_clock_that_is_behind() -> None:
        while not ended.wait(0.02):
            os.utime(tmp_path / LOCK, (time.time() - 60,) * 2)

    os.utime(tmp_path / LOCK, (time.time() - 60,) * 2)
    thread = threading.Thread(target=renew_by_a_clock_that_is_behind)
    thread.start()
    try:
        with pytest.raises(ValueError, match=f"process 12 on node7.*is gone for good, remove {tmp_path / LOCK}"):
            FolderLock(tmp_path)
    finally:
        ended.set()
        thread.join()


def test_the_lock_of_a_lost_machine_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server holds it until the machine's lease is over, longer than a killed process takes to end."""
    elsewhere(tmp_path)
    os.utime(tmp_path / LOCK, (1, 1))
    ends, lockf = time.monotonic() + 3 * lock.ENDING_S, lock.fcntl.lockf

    def held(file: int, flags: int) -> None:
        if time.monotonic() < ends:
            raise BlockingIOError(lock.errno.EAGAIN, "held by the server")
        lockf(file, flags)

    monkeypatch.setattr(lock.fcntl, "lockf", held)
    FolderLock(tmp_path).release()


def test_a_fork_does_not_release_the_lock(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    child = os.fork()
    if not child:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).is_file()
    held.release()
    assert not list(tmp_path.iterdir())


def test_a_run_that_stood_still_leaves_the_lock_of_the_run_that_took_over(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    elsewhere(tmp_path)
    first.release()
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node7"
