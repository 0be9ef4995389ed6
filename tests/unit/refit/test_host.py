"""Calls to an engine in another process: in turn, whatever other callers do, and an answer or an error in time."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mimo.config.rl import RolloutConfig
from mimo.refit.rendezvous import RefitError
from mimo.rl import launch_engine
from mimo.rollout.process import EngineHandle, EngineProcess, start_processes
from mimo.rollout.replicas import AnsweredError
from tests.support.echo_engine import engine_options, fail_to_start, sleep_long, use_breaking_engine, use_echo_engine
from tests.support.launch import ROOT


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    """An engine process for all tests; the last test kills it."""
    made = EngineProcess(engine_options(), call_timeout_s=60, setup=use_echo_engine)
    yield made
    made.close()


def done_so_far(handle: EngineHandle) -> list[int]:
    """Lengths of the names of the calls so far, twice each: as it began and as it ended."""
    return [int(each) for each in handle.prompt_logprobs([])[0]]


def test_an_error_of_the_engine_is_the_callers(process: EngineProcess) -> None:
    with pytest.raises(RefitError, match="^the weights are of another model$"):
        process.handle.update_weights({"name": "a", "error": RefitError("the weights are of another model")})
    with pytest.raises(RefitError, match=r"Traceback(.|\n)*ZeroDivisionError: by nothing"):
        process.handle.update_weights({"name": "a", "error": ZeroDivisionError("by nothing")})


class Unknown:
    """A value whose class the engine's process cannot import, because there is no module of this name."""

    __module__ = "nowhere"


def test_what_cannot_be_sent_is_an_error_and_the_engine_goes_on(process: EngineProcess,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefitError, match="^the result of own_lock cannot be sent:(.|\n)*cannot pickle"):
        process.handle.call("own_lock")
    monkeypatch.setitem(sys.modules, "nowhere", sys.modules[__name__])
    with pytest.raises(RefitError, match="ModuleNotFoundError: No module named 'nowhere'"):
        dataclasses.replace(process.handle, timeout_s=20).update_weights({"name": Unknown()})
    done_so_far(process.handle)


def test_one_call_at_a_time(process: EngineProcess) -> None:
    before = len(done_so_far(process.handle))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda name: process.handle.update_weights({"name": name, "seconds": 0.1}),
                         ("x", "yy", "zzz")))
    new = done_so_far(process.handle)[before:]
    assert new[::2] == new[1::2] and sorted(new[::2]) == [1, 2, 3]


def test_a_caller_that_says_nothing_keeps_nobody_waiting(process: EngineProcess) -> None:
    with socket.create_connection(process.handle.address):
        done_so_far(dataclasses.replace(process.handle, timeout_s=10))


def test_a_caller_without_the_key_gets_nothing(process: EngineProcess) -> None:
    stranger = dataclasses.replace(process.handle, key=b"guessed")
    assert b"guessed" not in repr(stranger).encode()
    with pytest.raises(RefitError, match="does not know this key"):
        stranger.prompt_logprobs([])


def test_a_caller_that_has_left_is_passed_over(process: EngineProcess) -> None:
    before = len(done_so_far(process.handle))
    impatient = dataclasses.replace(process.handle, timeout_s=0.3)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(process.handle.update_weights, {"name": "slow", "seconds": 1.0})
        time.sleep(0.2)
        with pytest.raises(RefitError, match=r"did not answer update_weights within 0\.3 s"):
            impatient.update_weights({"name": "never"})
        slow.result(30)
    assert done_so_far(process.handle)[before:] == [4, 4]


def test_an_engine_that_is_stopped_is_an_error_in_time(process: EngineProcess) -> None:
    impatient = dataclasses.replace(process.handle, timeout_s=0.5)
    assert process.process.pid is not None
    os.kill(process.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(RefitError, match=r"did not answer prompt_logprobs within 0\.5 s"):
            impatient.prompt_logprobs([])
        assert time.monotonic() - began < 10
    finally:
        os.kill(process.process.pid, signal.SIGCONT)
    done_so_far(process.handle)


def test_an_engine_that_is_killed_is_an_error_at_once(process: EngineProcess) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(process.handle.update_weights, {"name": "slow", "seconds": 1000})
        time.sleep(0.3)
        process.process.kill()
        with pytest.raises(RefitError, match="has ended: update_weights got no answer"):
            slow.result(10)
    with pytest.raises(RefitError, match="has ended: prompt_logprobs got no answer"):
        process.handle.prompt_logprobs([])
    process.process.join(10)
    assert process.process.exitcode == -signal.SIGKILL


STARTER = """
import os, signal, sys, time
from mimo.rollout.process import EngineProcess
from tests.support.echo_engine import engine_options, use_echo_engine
if __name__ == "__main__":
    process = EngineProcess(engine_options(), setup=use_echo_engine)
    print(process.process.pid, flush=True)
    os.kill(process.process.pid, signal.SIGSTOP)
    if sys.argv[1] == "error":
        from mimo.watchdog.process_exit import FailFast
        with FailFast("rank 0"):
            raise ValueError("the loss is nan")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", [pytest.param("error", marks=pytest.mark.slow), "killed"])
def test_a_stopped_engine_does_not_outlive_its_starter(end: str, tmp_path: Path) -> None:
    (tmp_path / "starter.py").write_text(STARTER)
    done = subprocess.run([sys.executable, str(tmp_path / "starter.py"), end], text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False)
    assert done.returncode == (1 if end == "error" else -signal.SIGKILL), done.stderr
    engine = int(done.stdout.split()[0])
    deadline = time.monotonic() + 30
    while psutil.pid_exists(engine) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = psutil.pid_exists(engine)
    if left:
        os.kill(engine, signal.SIGKILL)
    assert not left


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(RefitError, match=r"the engine for plain did not start(.|\n)*OSError: there is no such model"):
        EngineProcess(engine_options(), setup=fail_to_start)


@pytest.mark.slow
def test_replicas_start_together_and_answer_alone() -> None:
    processes = start_processes([engine_options(), engine_options(2)], 120, 60, use_echo_engine)
    try:
        first, second = (process.handle for process in processes)
        assert (first.num_workers, second.num_workers) == (1, 2)
        second.update_weights({"name": "abc"})
        assert done_so_far(first) == [] and done_so_far(second) == [3, 3]
    finally:
        for process in processes:
            process.close()


def test_the_caller_works_while_an_engine_starts_and_its_error_ends_the_engine() -> None:
    before, seen = set(multiprocessing.active_children()), []

    def work() -> None:
        (engine,) = set(multiprocessing.active_children()) - before
        seen.append(engine)
        raise ValueError("no rule for a tensor")

    with pytest.raises(ValueError, match="no rule for a tensor"):
        start_processes([dataclasses.replace(engine_options(), model="slow")], 120, 60, sleep_long, work)
    assert len(seen) == 1 and not seen[0].is_alive()


@pytest.mark.slow
def test_a_replica_that_does_not_start_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineProcess] = []
    start = EngineProcess.__init__

    def noted(self: EngineProcess, *arguments: Any, **named: Any) -> None:
        made.append(self)
        start(self, *arguments, **named)

    monkeypatch.setattr(EngineProcess, "__init__", noted)
    options = engine_options()
    with pytest.raises(RefitError, match=r"^replica 1: the engine for broken did not start(.|\n)*no such model"):
        start_processes([options, dataclasses.replace(options, model="broken"), options], 120, 60,
                        use_breaking_engine)
    assert len(made) == 3 and not any(process.process.is_alive() for process in made)


@pytest.mark.slow
def test_replicas_that_take_too_long_are_ended_in_time() -> None:
    with pytest.raises(RefitError, match=r"^replica 0: the engine for plain did not start within 0\.1 s: no answer"):
        start_processes([engine_options(), engine_options()], 0.1, 60, use_echo_engine)


def test_an_engine_that_hangs_is_lost_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_engine, "leave_group", use_echo_engine)
    monkeypatch.setattr(launch_engine, "ENDING_S", 0.1)
    monkeypatch.setattr(launch_engine, "ANSWER_S", 2.0)
    engines = launch_engine.ChildEngines([engine_options()] * 2, RolloutConfig())
    try:
        error = RefitError("sync 3, stage 'ready': trainer rank 0 waits for worker 1; nothing came within 60 s")
        assert launch_engine.lost_by(engines, error) == ""
        last = psutil.Process(engines._processes[1].process.pid)
        last.suspend()
        assert launch_engine.lost_by(engines, error) == (
            f"replica 1: process {last.pid} hangs and does not answer; {error}")
        # A replica that still works on its part of a call in which another one failed answers as little.
        assert launch_engine.lost_by(engines, AnsweredError("replica 0: ValueError: an image of 0 pixels")) == ""
        last.kill()
        engines._processes[1].process.join()
        assert "replica 1: process" in (lost := launch_engine.lost_by(engines, error)) and "has ended with" in lost
    finally:
        engines.close()
