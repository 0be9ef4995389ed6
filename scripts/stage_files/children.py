"""Run tasks on child processes and show their progress.

A task that makes no progress is given up, and its process replaced.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Isolated mode: start-up files of the site might import from the file system that hangs.
COPYING = (sys.executable, "-I", "-S", str(HERE / "worker.py"))
POLL_S = 0.5
# Seconds between two lines of output.
SHOW_S = 10.0


class StageError(Exception):
    """Staging cannot go on. The message names the file or folder."""


@dataclass
class Task:
    """A task of a child process.

    Attributes:
        name: the file or source, for messages.
        request: the request in the form that worker.py reads.
        attempts: number of starts so far.
    """

    name: str
    request: dict[str, Any]
    attempts: int = 0


class Child:
    """A child process and its task."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.process = subprocess.Popen([*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self.stdout = self.process.stdin, self.process.stdout
        self.task: Task | None = None
        self.heard = 0.0
        self._rest = b""

    def start(self, task: Task) -> None:
        self.task, self.heard = task, time.monotonic()
        task.attempts += 1
        try:
            self._stdin.write(json.dumps(task.request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, as its stdout will show

    def answers(self) -> list[dict[str, Any]] | None:
        """Return the answers since the last call, or None if the process has ended."""
        data = os.read(self.stdout.fileno(), 1 << 20)
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def give_up(self) -> None:
        """Kill the process without waiting for it, because even a killed process does not leave a call that hangs."""
        self.process.kill()
        for stream in (self._stdin, self.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # the process never read its last request


class Children:
    """A pool of child processes.

    Args:
        count: largest number of processes at a time.
        timeout_s: seconds without progress after which a task is given up.
        retries: number of further attempts of a task.
        command: the command of a child process.
    """

    def __init__(self, count: int, timeout_s: float, retries: int, command: tuple[str, ...] = COPYING) -> None:
        self._count, self._timeout_s, self._retries, self._command = count, timeout_s, retries, command
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for child in list(self._children):
            self._drop(child)
        self._selector.close()

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yield every answer of every task. The last one of a task has `done`; a new attempt begins with `again`.

        Raises:
            StageError: a task failed, or made no progress in any attempt.
        """
        waiting = deque(tasks)
        while waiting or any(child.task for child in self._children):
            self._hand_out(waiting)
            for key, _ in self._selector.select(min(POLL_S, self._timeout_s / 4)):
                child: Child = key.data
                yield from self._listen(child, waiting)
            # Only after all answers are read, because this process may have been stopped for a while itself.
            for child in list(self._children):
                if child.task and time.monotonic() - child.heard > self._timeout_s:
                    task = child.task
                    self._drop(child)
                    yield self._again(task, f"no progress for {self._timeout_s:g} s", waiting)

    def _hand_out(self, waiting: deque[Task]) -> None:
        idle = [child for child in self._children if child.task is None]
        while waiting and (idle or len(self._children) < self._count):
            if not idle:
                idle.append(Child(self._command))
                self._children.append(idle[0])
                self._selector.register(idle[0].stdout, selectors.EVENT_READ, idle[0])
            idle.pop().start(waiting.popleft())

    def _listen(self, child: Child, waiting: deque[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        answers, task = child.answers(), child.task
        if answers is None:
            self._drop(child)
            if task is not None:
                yield self._again(task, f"the process that worked on it ended with code {child.process.wait()}",
                                  waiting)
            return
        for answer in answers:
            assert task is not None, answer
            if "error" in answer:
                child.task = None
                if answer["final"]:
                    raise StageError(answer["error"])
                yield self._again(task, answer["error"], waiting)
                return
            if "done" in answer:
                child.task = None
            yield task, answer

    def _again(self, task: Task, reason: str, waiting: deque[Task]) -> tuple[Task, dict[str, Any]]:
        """Put a task back, or raise StageError after its last attempt."""
        if task.attempts > self._retries:
            times = f", {task.attempts} times" if task.attempts > 1 else ""
            # Most errors of the system already name the file.
            name = "" if task.name in reason else f"{task.name}: "
            raise StageError(f"{name}{reason}{times}")
        waiting.append(task)
        return task, {"again": reason}

    def _drop(self, child: Child) -> None:
        self._selector.unregister(child.stdout)
        child.give_up()
        self._children.remove(child)


def format_gb(count: float) -> str:
    """Format bytes as GB (10^9), small numbers with more digits."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 or not count else f"{count / 1e9:.3g} GB"


class Progress:
    """Counts copied bytes and prints progress.

    Args:
        host: name of this host, which begins each line.
        total: number of bytes to copy.
    """

    def __init__(self, host: str, total: int = 0) -> None:
        self.host, self.total = host, total
        self._done: dict[str, int] = {}
        self._began = self._shown = time.monotonic()

    def say(self, message: str) -> None:
        """Print a line on stderr, because stdout is for the result."""
        print(f"{self.host}: {message}", file=sys.stderr, flush=True)

    def follow(self, answers: Iterable[tuple[Task, dict[str, Any]]]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Pass the answers on and print the progress that they report."""
        for task, answer in answers:
            if "again" in answer:
                self.say(f"{task.name}: {answer['again']}: trying again")
                self._done.pop(task.name, None)
            self._done[task.name] = self._done.get(task.name, 0) + answer.get("bytes", 0) + answer.get("kept", 0)
            if answer.get("done", {}).get("kept"):
                self.say(f"{task.name}: continued after the {format_gb(answer['done']['kept'])} of an interrupted copy")
            if time.monotonic() - self._shown > SHOW_S:
                self._shown = time.monotonic()
                done = sum(self._done.values())
                rate = format_gb(done / (self._shown - self._began))
                self.say(f"{format_gb(done)} of {format_gb(self.total)}, {rate}/s")
            yield task, answer
