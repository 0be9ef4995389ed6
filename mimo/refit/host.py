"""A rollout engine in a process of its own, and handles to it that travel to other processes.

A call takes as long as it takes, up to a limit, and an engine that has died or is stuck is an error that says so.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from mimo.refit.engine import EngineOptions, Rollout, RolloutEngine, Sampling
from mimo.refit.meeting import RefitError


@dataclass(frozen=True)
class EngineHandle:
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

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """As the engine's."""
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """As the engine's."""
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the engine's."""
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As the engine's."""
        self.call("finish_weight_update", weight_version)

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling) -> list[list[Rollout]]:
        """As the engine's."""
        answers: list[list[Rollout]] = self.call("generate", prompts, sampling)
        return answers

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """As the engine's."""
        logprobs: list[list[float]] = self.call("prompt_logprobs", prompts)
        return logprobs

    def call(self, method: str, *arguments: Any) -> Any:
        """Any method of the engine.

        Raises:
            RefitError: it raised, has ended, or did not answer in time.
        """
        try:
            with Client(self.address, authkey=self.key) as connection:
                connection.send((method, arguments))
                if not connection.poll(self.timeout_s):
                    raise RefitError(f"the engine at {self.address[0]}:{self.address[1]} did not answer {method} "
                                     f"within {self.timeout_s:g} s")
                succeeded, value = connection.recv()
        except (EOFError, OSError) as error:
            raise RefitError(f"the engine at {self.address[0]}:{self.address[1]} has ended: {method} got no answer "
                             f"({type(error).__name__})") from error
        if not succeeded:
            raise RefitError(value)
        return value


class EngineProcess:
    """Starts an engine in a child process; `close` it.

    Args:
        options: what it is.
        start_timeout_s: seconds that it may take to come up.
        call_timeout_s: seconds that a call may take.
        setup: called in the child before the engine is made; importable.

    Raises:
        RefitError: it did not come up, with its own traceback.
    """

    def __init__(self, options: EngineOptions, start_timeout_s: float = 600.0, call_timeout_s: float = 600.0,
                 setup: Callable[[], None] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._key = os.urandom(32)
        # Not a daemon: an engine of several workers starts processes itself.
        self.process = context.Process(target=_serve, args=(options, self._key, there, setup))
        self.process.start()
        there.close()
        try:
            succeeded, value = here.recv() if here.poll(start_timeout_s) else (False, "no answer in time")
        except EOFError:
            succeeded, value = False, f"its process ended with code {self.process.exitcode}"
        if not succeeded:
            self.close()
            raise RefitError(f"the engine for {options.model} did not start within {start_timeout_s:g} s: {value}")
        self._here = here  # open as long as this process lives: the child ends with it
        self.handle = EngineHandle(value, self._key, options.num_workers, call_timeout_s)

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(options: EngineOptions, key: bytes, starter: Connection, setup: Callable[[], None] | None) -> None:
    try:
        if setup is not None:
            setup()
        engine = RolloutEngine(options)
        listener = Listener(("127.0.0.1", 0), authkey=key)
    except Exception:  # of any kind: it is told to who started this process
        starter.send((False, traceback.format_exc()))
        return
    starter.send((True, listener.address))
    threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
    while True:
        try:
            connection = listener.accept()
        except (EOFError, OSError, multiprocessing.AuthenticationError):
            continue  # a caller that left before it said anything, or that has no key
        with connection:
            _answer(engine, connection)


def _answer(engine: RolloutEngine, connection: Connection) -> None:
    """One call at a time: an engine takes no two at once."""
    try:
        method, arguments = connection.recv()
    except (EOFError, OSError):
        return
    try:
        answer = True, getattr(engine, method)(*arguments)
    except Exception as error:  # of any kind: it is told to who called
        answer = False, str(error) if isinstance(error, RefitError) else traceback.format_exc()
    try:
        connection.send(answer)
    except OSError:
        return  # the caller did not wait


def _end_with(starter: Connection) -> None:
    """End this process when the one that started it does: nobody is left to end it."""
    try:
        starter.recv()
    except (EOFError, OSError):
        os._exit(1)
