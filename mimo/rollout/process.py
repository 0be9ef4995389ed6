"""A rollout engine in a process of its own, and handles to it that travel to other processes.

A call takes as long as it takes, up to a limit, and an engine that has died or is stuck is an error that says so.

The process is not an actor of a local Ray, because starting Ray takes longer: an engine that does nothing was up after
25 s instead of 4 s (medians of three starts on two busy cores). Of these, 11 s are Ray's own:
`python -c "import ray; ray.init(num_cpus=1); ray.get(ray.remote(lambda: 0).remote())"`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Any

from mimo.refit.rendezvous import RefitError
from mimo.rollout import engine_guard
from mimo.rollout.engine import EngineOptions, Rollout, RolloutEngine, Sampling


class EngineCalls(ABC):
    """The methods of an engine that is somewhere else, by one way to call any of them."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine. Raises RefitError if it raises, has ended, or does not answer in time."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do as the engine does."""
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Do as the engine does."""
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do as the engine does."""
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do as the engine does."""
        self.call("finish_weight_update", weight_version)

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Do as the engine does; the call itself takes no longer than others."""
        loaded: str = self.call("load_from_disk", folder, version, timeout_s)
        return loaded

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        """Do as the engine does."""
        answers: list[list[Rollout]] = self.call("generate", prompts, sampling, seeds)
        return answers

    def sleep(self) -> None:
        """Do as the engine does."""
        self.call("sleep")

    def wake_up(self, *tags: str) -> None:
        """Do as the engine does."""
        self.call("wake_up", *tags)

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Do as the engine does."""
        logprobs: list[list[float]] = self.call("prompt_logprobs", prompts)
        return logprobs


@dataclass(frozen=True)
class EngineHandle(EngineCalls):
    """Calls an engine in another process; has its methods. Can be pickled; each call has a connection of its own.

    Attributes:
        address: host and port that it listens at.
        key: without which it answers nobody.
        num_workers: that take in weights.
        timeout_s: seconds that a call may take.
    """

    address: tuple[str, int]
    key: bytes = field(repr=False)
    num_workers: int
    timeout_s: float = 600.0

    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine.

        Raises:
            RefitError: it raised, has ended, or did not answer in time.
        """
        deadline = time.monotonic() + self.timeout_s
        engine = f"the engine at {self.address[0]}:{self.address[1]}"
        try:
            with _connected(self.address, self.timeout_s) as connection:
                answer_challenge(connection, self.key)
                deliver_challenge(connection, self.key)
                connection.send((method, arguments))
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                succeeded, value = connection.recv()
        except (TimeoutError, BlockingIOError) as error:
            raise RefitError(f"{engine} did not answer {method} within {self.timeout_s:g} s") from error
        except multiprocessing.AuthenticationError as error:
            raise RefitError(f"{engine} does not know this key") from error
        except (EOFError, OSError) as error:
            raise RefitError(f"{engine} has ended: {method} got no answer ({type(error).__name__})") from error
        if not succeeded:
            raise RefitError(value)
        return value


class EngineProcess:
    """Starts an engine in a child process; `close` it. Several start faster with `start_processes`.

    Args:
        options: what it is.
        start_timeout_s: seconds that it may take to come up.
        call_timeout_s: seconds that a call may take.
        setup: called in the child before the engine is made; importable.
        is_awaited: return when it is up; else call `wait_until_up`.

    Raises:
        RefitError: it did not come up, with its own traceback.
    """

    def __init__(self, options: EngineOptions, start_timeout_s: float = 600.0, call_timeout_s: float = 600.0,
                 setup: Callable[[], None] | None = None, is_awaited: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._options, self._start_timeout_s, self._call_timeout_s = options, start_timeout_s, call_timeout_s
        # Open as long as this process lives: the child ends with it.
        self.starter, there = context.Pipe()
        self._key = os.urandom(32)
        # Not a daemon: an engine of several workers starts processes itself.
        self.process = context.Process(target=_serve, args=(options, self._key, there, setup))
        self.process.start()
        # In a session of its own, as a launcher ends all of this process's. Its standard input ends with this process.
        self._guard = subprocess.Popen([sys.executable, "-P", engine_guard.__file__, str(self.process.pid)],
                                       stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self.close)  # else the end of this process waits for that of the engine, which never comes
        there.close()
        if is_awaited:
            self.wait_until_up(start_timeout_s)

    def wait_until_up(self, patience_s: float) -> None:
        """Wait for the start so much longer; `handle` is there then. Raises RefitError where it failed or is late."""
        try:
            address, error = self.starter.recv() if self.starter.poll(patience_s) else (None, "no answer in time")
        except EOFError:
            self.process.join(10)
            address, error = None, f"its process ended with code {self.process.exitcode}"
        if address is None:
            self.close()
            raise RefitError(f"the engine for {self._options.model} did not start within {self._start_timeout_s:g} s: "
                             f"{error}")
        self.handle = EngineHandle(address, self._key, self._options.num_workers, self._call_timeout_s)

    def close(self) -> None:
        """End it, whatever it does."""
        atexit.unregister(self.close)
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        # It ends what the engine has left behind.
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def start_processes(options: Sequence[EngineOptions], start_timeout_s: float = 600.0, call_timeout_s: float = 600.0,
                    setup: Callable[[], None] | None = None) -> list[EngineProcess]:
    """Start replicas of an engine at the same time.

    Args:
        options: of each.
        start_timeout_s: seconds that all of them may take to come up.
        call_timeout_s: seconds that a call may take.
        setup: as for `EngineProcess`.

    Raises:
        RefitError: one did not come up; it is named, and the others are ended.
    """
    deadline = time.monotonic() + start_timeout_s
    processes: list[EngineProcess] = []
    try:
        for each in options:
            processes.append(EngineProcess(each, start_timeout_s, call_timeout_s, setup, is_awaited=False))
        left = set(range(len(processes)))
        while left:
            spoke = wait([processes[number].starter for number in left], max(0.0, deadline - time.monotonic()))
            # Where time is up, the first that is left says so.
            for number in [each for each in sorted(left) if processes[each].starter in spoke] or sorted(left):
                left.remove(number)
                try:
                    processes[number].wait_until_up(0.0)
                except RefitError as error:
                    raise RefitError(f"replica {number}: {error}") from error
    except BaseException:
        for process in processes:
            process.close()
        raise
    return processes


def _connected(address: tuple[str, int], timeout_s: float) -> Connection:
    """A connection on which nothing waits longer than so many seconds: an engine that is stopped accepts, too."""
    with socket.create_connection(address, timeout_s) as opened:
        opened.settimeout(None)  # the limits below are the kernel's; Python's own would make the socket non-blocking
        _send_at_once(opened)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return Connection(opened.detach())


def _send_at_once(opened: socket.socket) -> None:
    """Turn off Nagle's algorithm: waiting to fill packets costs each small call tens of milliseconds."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(frozen=True)
class _Call:
    """Request to the engine, and where its answer goes."""

    connection: Connection
    method: str
    arguments: tuple[Any, ...]


def _serve(options: EngineOptions, key: bytes, starter: Connection, setup: Callable[[], None] | None) -> None:
    threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
    try:
        engine = make_engine(options, setup)
        listener = Listener(("127.0.0.1", 0), backlog=64)
    except Exception:  # of any kind: it is told to who started this process
        starter.send((None, traceback.format_exc()))
        return
    # An engine takes no two calls at once, and all on one thread; callers that are slow to speak wait on their own.
    calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    threading.Thread(target=_accept, args=(listener, key, calls), daemon=True).start()
    starter.send((listener.address, ""))
    while True:
        call = calls.get()
        with call.connection:
            _answer(engine, call)


def _accept(listener: Listener, key: bytes, calls: queue.SimpleQueue[_Call]) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:
            continue  # a caller that left at once
        threading.Thread(target=_hear, args=(connection, key, calls), daemon=True).start()


def _hear(connection: Connection, key: bytes, calls: queue.SimpleQueue[_Call]) -> None:
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as opened:
            _send_at_once(opened)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        method, arguments = connection.recv()
    except (EOFError, OSError, multiprocessing.AuthenticationError):
        connection.close()  # a caller that left before it said anything, or that has no key
    else:
        calls.put(_Call(connection, method, arguments))


def _answer(engine: RolloutEngine, call: _Call) -> None:
    if call.connection.poll():
        return  # nothing more comes from a caller but its end: it did not wait for its turn
    try:
        call.connection.send(answer_of(engine, call.method, call.arguments))
    except OSError:
        return  # the caller did not wait


def make_engine(options: EngineOptions, setup: Callable[[], None] | None) -> RolloutEngine:
    """Make an engine in this process, after calling `setup`."""
    if setup is not None:
        setup()
    return RolloutEngine(options)


def answer_of(engine: RolloutEngine, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Call an engine; return whether it succeeded, and its result or the error in words."""
    try:
        return True, getattr(engine, method)(*arguments)
    except Exception as error:  # of any kind: it is told to who called
        return False, str(error) if isinstance(error, RefitError) else traceback.format_exc()


def _end_with(starter: Connection) -> None:
    """End this process when the one that started it does: nobody is left to end it."""
    try:
        starter.recv()
    except (EOFError, OSError):
        os._exit(1)
