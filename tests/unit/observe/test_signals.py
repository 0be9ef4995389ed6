"""Signals that stop a run: what a process does when it is blocked, moves, has children."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from mimo.watchdog.signals import StopSignal

PRELUDE = """
import os, signal, sys, threading, time
from mimo.watchdog import signals
from mimo.watchdog.watchdog import Watchdog
signals.GRACE_S = 0.5
watchdog = Watchdog(0, "rank 3 (vision grid)")
stop = signals.StopSignal(watchdog)
"""
READY = "print('ready', flush=True)\n"
# No other process ever joins the send: the receive blocks in C, where Python runs no signal handler.
GLOO = """
import torch
import torch.distributed as dist
store = dist.FileStore(sys.argv[1], 2)
if os.fork() == 0:
    stop.close()
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=1, world_size=2)
    sys.stdin.read()
    os._exit(0)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
def receive():
    dist.recv(torch.zeros(1), src=1)
"""
EVENT = """
def receive():
    threading.Event().wait()
"""
BLOCK = """
watchdog.progress(iteration=4)
with watchdog.waiting("bridge recv_forward", peer="vision rank 1", lane=2):
    receive()
"""


def ready(process):
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


@pytest.mark.parametrize("blocked_in", [EVENT, GLOO], ids=["event", "gloo"])
def test_sigterm_while_blocked_reports_and_exits_143(start, tmp_path, blocked_in):
    process = ready(start(PRELUDE + blocked_in + READY + BLOCK, tmp_path / "store"))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    process.stdin.close()
    error = process.stderr.read()
    assert "SIGTERM could not be honoured on rank 3 (vision grid): no progress for " in error
    assert "iteration 4; waiting for bridge recv_forward (peer vision rank 1, lane 2) for " in error
    assert "in receive" in error


def test_sigterm_lets_a_moving_run_finish(start):
    # A shell's background jobs start with SIGINT ignored, so it is compared with what it was.
    process = ready(start("import signal\nINTERRUPT = signal.getsignal(signal.SIGINT)\n"
                          + PRELUDE.replace("0.5", "1.5") + READY + """
while not stop.name:
    time.sleep(0.05)
for step in range(10):  # longer than the grace, but each part is progress
    time.sleep(0.2)
    watchdog.progress(iteration=step)
with watchdog.limit(600):  # the checkpoint
    time.sleep(2)
name = stop.name
stop.close()
stop.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is INTERRUPT
assert signal.set_wakeup_fd(-1) == -1
print(name)
"""))
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert (process.returncode, out, error) == (0, "SIGTERM\n", "")


def test_the_grace_is_twice_what_a_part_of_the_run_has_taken(start):
    process = ready(start(PRELUDE + "watchdog.longest_s = 1.5\n" + READY + """
while not stop.name:
    time.sleep(0.05)
watchdog.progress()
time.sleep(1.5)  # longer than the least grace
watchdog.progress()
print(stop.name)
stop.close()
"""))
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert (process.returncode, out, error) == (0, "SIGTERM\n", "")


def test_no_part_of_the_run_stretches_the_grace_beyond_the_limit_of_the_watchdog(start):
    process = ready(start(PRELUDE + "watchdog.longest_s, watchdog.timeout_s = 1e6, 1.0\n" + EVENT + READY + BLOCK))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def test_sigint_once_is_a_request_and_twice_an_exit(start):
    process = ready(start(PRELUDE.replace("0.5", "600") + READY + EVENT + """
while not stop.name:
    time.sleep(0.05)
print(stop.name, flush=True)
receive()
"""))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.stderr.read() == "interrupted twice: rank 3 (vision grid) exits without finishing the iteration\n"


def test_sigint_while_blocked_exits_130(start):
    process = ready(start(PRELUDE + EVENT + READY + BLOCK))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "SIGINT could not be honoured" in process.stderr.read()


def test_other_signals_are_left_alone(start):
    process = ready(start(PRELUDE + """
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
""" + READY + """
while not seen:
    time.sleep(0.05)
time.sleep(1)
print(bool(stop.name))
"""))
    process.send_signal(signal.SIGUSR1)
    out, error = process.communicate()
    assert (process.returncode, out, error) == (0, "False\n", "")


def test_a_forked_worker_dies_of_sigterm_and_its_parent_goes_on(start):
    process = start(PRELUDE + """
pid = os.fork()
if pid == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
_, status = os.waitpid(pid, 0)
time.sleep(1)
print(os.waitstatus_to_exitcode(status), bool(stop.name))
""")
    os.kill(int(process.stdout.readline()), signal.SIGTERM)
    out, error = process.communicate()
    assert (process.returncode, out) == (0, "-15 False\n"), error


def test_closing_does_not_wait_for_forked_processes() -> None:
    stop = StopSignal(SimpleNamespace(who="rank 0"))
    worker = os.fork()
    if not worker:
        signal.pause()
        os._exit(0)
    try:
        # Beside the main thread, so that the test ends where closing does not; handlers are put back by the main one.
        stop._restore(stop._old_wakeup_fd)
        stop._open, stop._restore = True, lambda fd: None
        closing = threading.Thread(target=stop.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
