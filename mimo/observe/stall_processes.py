"""Processes of a run on this host: which one this is, which a signal has stopped, and the end of those left over."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from mimo.observe.errors import STDERR_FD
from mimo.observe.stall_status import RankProcess

# faulthandler prints all stacks on it, also while a call into C keeps the interpreter's lock. Nobody else uses it.
STACKS_SIGNAL = signal.SIGRTMIN + 7
# Seconds between that and the end of the process; it has to be scheduled, on a host that may be overloaded.
STACKS_S = 2.0
STOPPED = ("T", "t")


def own_process(rank: int) -> RankProcess:
    """This process."""
    return RankProcess(rank, socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def show_stacks_on_signal() -> None:
    """Let `end_processes` make this process print its stacks."""
    faulthandler.register(STACKS_SIGNAL, file=STDERR_FD, all_threads=True)


def stopped_siblings() -> tuple[int, ...]:
    """Children of this process's parent, so other ranks under the same launcher, that a signal has stopped."""
    stopped = []
    for pid in _children(os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            if _stat(pid)[0] in STOPPED:
                stopped.append(pid)
    return tuple(stopped)


def end_processes(processes: Iterable[RankProcess]) -> None:
    """End those of these processes that are on this host and still there: they cannot do so themselves.

    A stopped one would keep its launcher waiting, a hung one prints its stacks first.
    """
    here = socket.gethostname()
    left = [process for process in processes if process.host == here and process.pid != os.getpid()]
    hung = [process for process in left if _is_there(process) and _stat_or_gone(process.pid) not in STOPPED]
    for process in hung:
        _send(process, STACKS_SIGNAL)
    if hung:
        time.sleep(STACKS_S)
    for process in left:
        _send(process, signal.SIGKILL)


def _send(process: RankProcess, number: int) -> None:
    # Another rank of this host may have been faster.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if _is_there(process):
            os.kill(process.pid, number)


def _is_there(process: RankProcess) -> bool:
    """Whether the process still runs; its number alone may be another one's by now."""
    try:
        state, started = _stat(process.pid)
    except ProcessLookupError:
        return False
    return started == process.started and state != "Z"


def _stat_or_gone(pid: int) -> str:
    try:
        return _stat(pid)[0]
    except ProcessLookupError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process. Raises ProcessLookupError where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return fields[0], int(fields[19])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
