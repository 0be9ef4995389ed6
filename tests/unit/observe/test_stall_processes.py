from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mimo.watchdog.process_exit import end_processes, own_process, stopped_siblings
from mimo.watchdog.status import RankProcess

WAITS = "import time; print('up', flush=True); time.sleep(600)"
SHOWS = "from mimo.watchdog.process_exit import show_stacks_on_signal\nshow_stacks_on_signal()\n"
LOCKED = SHOWS + """
import ctypes
def keeps_the_lock():
    print('up', flush=True)
    # PyDLL, unlike CDLL, keeps the lock during the call. A mutex, unlike sleep, is not left on a signal.
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
keeps_the_lock()
"""


def process_of(pid: int) -> RankProcess:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(own_process(1), pid=pid, started=int(fields[19]))


def test_this_process():
    assert own_process(3) == replace(process_of(os.getpid()), rank=3)


def test_a_process_that_keeps_the_interpreters_lock_prints_its_stacks_and_ends(start):
    process = start(LOCKED)
    assert process.stdout.readline() == "up\n"
    end_processes([process_of(process.pid)])
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "in keeps_the_lock" in error


def test_a_stopped_process_is_seen_and_ends(start):
    process = start(WAITS)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not (looks := siblings_of_a_child(start, process.pid)):
        assert time.monotonic() < deadline
    assert looks == [process.pid]
    end_processes([process_of(process.pid)])
    assert process.wait(60) == -signal.SIGKILL


def siblings_of_a_child(start, pid: int) -> list[int]:
    """Return what another child of this process sees."""
    child = start("from mimo.watchdog.process_exit import stopped_siblings\nprint(*stopped_siblings())")
    out, _ = child.communicate(timeout=60)
    return [int(word) for word in out.split() if int(word) == pid]


@pytest.mark.parametrize("other", [{"host": "another-host"}, {"started": 1}])
def test_processes_of_other_hosts_and_with_a_used_number_are_left_alone(start, other):
    process = start(WAITS)
    assert process.stdout.readline() == "up\n"
    end_processes([replace(process_of(process.pid), **other), own_process(0)])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


def test_this_process_is_not_stopped():
    assert os.getpid() not in stopped_siblings()
