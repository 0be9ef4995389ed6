"""A rollout engine in a process of its own, and handles to it that can be sent to other processes.

Calls have a time limit, and an engine that has died or hangs causes an error that says so.

The process is not an actor of a local Ray, because starting Ray takes longer: an engine that does nothing was up after
25 s instead of 4 s (medians of three starts on two busy cores). Of these, 11 s are Ray's own:
`python -c "import ray; ray.init(num_cpus=1); ray.get(ray.remote(lambda: 0).remote())"`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mimo.platform import quieten_megatron
from mimo.refit.rendezvous import RefitError
from mimo.rollout import engine_guard
from mimo.rollout.engine import EngineOptions, NodePlace, RolloutEngine, at_meeting_point
from mimo.rollout.replicas import RolloutClient

# Variables that torchrun sets for its workers. In an engine's process they would make its own process group join the
# trainer's.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                      "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIX = "TORCHELASTIC_"


class EngineLostError(RefitError):
    """An engine has ended or does not answer. A new one can take its place."""


@dataclass(frozen=True)
class EngineHandle(RolloutClient):
    """Calls an engine in another process. It can be pickled, because each call opens a connection of its own.

    Attributes:
        address: host and port at which the engine listens.
        key: secret that a caller has to know.
        num_workers: number of workers that take in weights.
        timeout_s: seconds that a call may take.
    """

    address: tuple[str, int]
    key: bytes = field(repr=False)
    num_workers: int
    timeout_s: float = 600.0

    def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the engine.

        Raises:
            RefitError: it raised.
            EngineLostError: it has ended, or did not answer in time.
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
            raise EngineLostError(f"{engine} did not answer {method} within {self.timeout_s:g} s") from error
        except multiprocessing.AuthenticationError as error:
            raise RefitError(f"{engine} does not know this key") from error
        except (EOFError, OSError) as error:
            raise EngineLostError(f"{engine} has ended: {method} got no answer ({type(error).__name__})") from error
        if not succeeded:
            raise RefitError(value)
        return value


class EngineProcess:
    """Starts an engine in a child process. End it with `close`. `start_processes` starts several at once.

    `setup` is an importable function that the child calls before it makes the engine. Without `is_awaited`, call
    `wait_until_up`.

    Raises:
        RefitError: the engine did not start, with its own traceback.
    """

    def __init__(self, options: EngineOptions, start_timeout_s: float = 600.0, call_timeout_s: float = 600.0,
                 setup: Callable[[], None] | None = None, is_awaited: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._options, self._start_timeout_s, self._call_timeout_s = options, start_timeout_s, call_timeout_s
        # The child ends when this pipe closes, as it does when this process ends.
        self.starter, there = context.Pipe()
        self._key = os.urandom(32)
        # Not a daemon: an engine of several workers starts processes itself.
        self.process = context.Process(target=_serve, args=(options, self._key, there, setup))
        self.process.start()
        # The guard has a session of its own, because a launcher ends all processes of this one's session. Its standard
        # input ends with this process.
        self._guard = subprocess.Popen([sys.executable, "-P", engine_guard.__file__, str(self.process.pid)],
                                       stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self.close)  # Otherwise this process would wait for the engine's end at exit, for ever.
        there.close()
        if is_awaited:
            self.wait_until_up(start_timeout_s)

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait for the start, then set `handle`. Raises RefitError if the start failed or took too long."""
        try:
            address, error = self.starter.recv() if self.starter.poll(timeout_s) else (None, "no answer in time")
        except EOFError:
            self.process.join(10)
            address, error = None, f"its process ended with code {self.process.exitcode}"
        if address is None:
            self.close()
            raise RefitError(f"the engine for {self._options.model} did not start within {self._start_timeout_s:g} s: "
                             f"{error}")
        self.handle = EngineHandle(address, self._key, self._options.num_workers, self._call_timeout_s)

    def close(self) -> None:
        """End the engine's process and all processes that it has started."""
        atexit.unregister(self.close)
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        # The guard ends processes that the engine has left behind.
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def start_processes(options: Sequence[EngineOptions], start_timeout_s: float = 600.0, call_timeout_s: float = 600.0,
                    setup: Callable[[], None] | None = None,
                    meanwhile: Callable[[], None] | None = None) -> list[EngineProcess]:
    """Start replicas of an engine at the same time.

    All of them have to start within `start_timeout_s`. `setup` is that of `EngineProcess`. `meanwhile` is called once
    in this process, while the replicas start.

    Raises:
        RefitError: one did not start. The error names it, and the others are ended.
    """
    deadline = time.monotonic() + start_timeout_s
    if options[0].data_parallel_size > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = [at_meeting_point(each, "127.0.0.1", port) for each in options]
    processes: list[EngineProcess] = []
    try:
        for each in options:
            processes.append(EngineProcess(each, start_timeout_s, call_timeout_s, setup, is_awaited=False))
        if meanwhile is not None:
            meanwhile()
        left = set(range(len(processes)))
        while left:
            answered = wait([processes[number].starter for number in left], max(0.0, deadline - time.monotonic()))
            # If time is up, the first of those that are left raises the error.
            for number in [each for each in sorted(left) if processes[each].starter in answered] or sorted(left):
                left.remove(number)
                try:
                    processes[number].wait_until_up(0.0)
                except RefitError as error:
                    raise RefitError(f"replica {number}: {error}") from error
    except BaseException:  # No engine is left behind, whatever ends the start, Ctrl-C included.
        for process in processes:
            process.close()
        raise
    return processes


def _connected(address: tuple[str, int], timeout_s: float) -> Connection:
    """Connect with a time limit for every read and write, because even a stopped engine accepts connections."""
    with socket.create_connection(address, timeout_s) as opened:
        opened.settimeout(None)  # Python's timeout would make the socket non-blocking, so the kernel's is set.
        _send_at_once(opened)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return Connection(opened.detach())


def _send_at_once(opened: socket.socket) -> None:
    """Turn off Nagle's algorithm, which delays each small call by tens of milliseconds."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _serve(options: EngineOptions, key: bytes, starter: Connection, setup: Callable[[], None] | None) -> None:
    threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
    try:
        engine = make_engine(options, setup)
        listener = Listener(("127.0.0.1", 0), backlog=64)
    except Exception:  # Any error is reported to the process that started this one.
        starter.send((None, traceback.format_exc()))
        return
    # The engine processes one call at a time, all on this thread. Requests are read on other threads, so that a slow
    # caller does not delay others.
    calls: queue.SimpleQueue[tuple[Connection, str, tuple[Any, ...]]] = queue.SimpleQueue()

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError):  # The caller has disconnected already.
                threading.Thread(target=read_request, args=(listener.accept(),), daemon=True).start()

    def read_request(connection: Connection) -> None:
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as opened:
                _send_at_once(opened)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            calls.put((connection, *connection.recv()))
        except (EOFError, OSError, multiprocessing.AuthenticationError):
            connection.close()  # The caller has disconnected, or does not know the key.
        except Exception:  # The request names something that this process cannot import.
            with connection, contextlib.suppress(OSError):
                connection.send((False, traceback.format_exc()))

    threading.Thread(target=accept, daemon=True).start()
    starter.send((listener.address, ""))
    while True:
        connection, method, arguments = calls.get()
        with connection, contextlib.suppress(OSError):  # The caller has disconnected.
            # A caller sends nothing after its request, so that there is something to read only at its end.
            if not connection.poll():
                connection.send_bytes(_pickled(method, answer_of(engine, method, arguments)))


def make_engine(options: EngineOptions, setup: Callable[[], None] | None,
                place: NodePlace | None = None) -> RolloutEngine:
    """Make an engine in this process, after calling `setup`. `place` is its first node if it spreads over several."""
    # Loading weights from a disk imports parts of Megatron Core.
    quieten_megatron()
    if setup is not None:
        setup()
    return RolloutEngine(options, place)


def answer_of(engine: RolloutEngine, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Call an engine. Return whether that succeeded, and the result or the error as text."""
    try:
        return True, getattr(engine, method)(*arguments)
    except Exception as error:  # Any error is reported to the caller.
        return False, str(error) if isinstance(error, RefitError) else traceback.format_exc()


def _pickled(method: str, answer: tuple[bool, Any]) -> memoryview:
    """Pickle an answer as `Connection.send` does, or an error in its place if it cannot be pickled."""
    try:
        return ForkingPickler.dumps(answer)
    except Exception:  # Pickling calls methods of the object, which may raise anything.
        return ForkingPickler.dumps((False, f"the result of {method} cannot be sent:\n{traceback.format_exc()}"))


def _end_with(starter: Connection) -> None:
    """End this process when the one that started it ends."""
    try:
        starter.recv()
    except (EOFError, OSError):
        os._exit(1)


# Functions that a child engine or an actor calls first (`setup`), to be independent of the launcher that started the
# trainer.


def leave_group() -> None:
    """Leave the trainer's process group, in the process of a child engine.

    The launcher sends its signals to the group. A trainer that is told to stop finishes its iteration first, and needs
    its engine for that. The engine ends when the trainer does.
    """
    leave_launcher()
    os.setsid()


def leave_launcher() -> None:
    """Forget the launcher in the engine's process, which is not a worker and ends with the rank that started it."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIX):
            del os.environ[name]
    # Ctrl-C reaches every process of the terminal; the trainer finishes its iteration first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
