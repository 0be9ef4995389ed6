"""Turns a hang into an exit that says which rank waited for what, at which step."""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo.observe.errors import STDERR_FD, exit_now, within_limit, write_report

STALL_EXIT_CODE = 17
# Seconds between looks at the clock; a changed limit takes effect within it.
POLL_S = 1.0


class Wait:
    """One thing the main thread waits for; made by `Watchdog.waiting`."""

    __slots__ = ("what", "details", "since", "outer", "_watchdog")

    def __init__(self, watchdog: Watchdog, what: str, details: dict[str, object]) -> None:
        self.what = what
        self.details = details
        self.since = 0.0
        self.outer: Wait | None = None
        self._watchdog = watchdog

    def __enter__(self) -> Wait:
        watchdog = self._watchdog
        self.outer = watchdog.current_wait
        self.since = watchdog.last_change = time.monotonic()
        watchdog.current_wait = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watchdog.current_wait = self.outer
        self._watchdog.last_change = time.monotonic()

    def describe(self, now: float) -> str:
        """The wait in words: `bridge recv_forward (peer vision rank 0, lane 1) for 12.0 s`."""
        details = ", ".join(f"{name} {value() if callable(value) else value}" for name, value in self.details.items()
                            if value is not None)
        return f"{self.what}{f' ({details})' if details else ''} for {now - self.since:.1f} s"


def thread_stacks() -> str:
    """The Python stack of every thread but the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    blocks = [f"thread {names.get(ident, ident)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
              for ident, frame in frames if ident != threading.get_ident()]
    return "".join(blocks)


class Watchdog:
    """Watches one rank's main thread from a daemon thread.

    The main thread says where it is with `progress` and `waiting`, which only write attributes. When nothing changed
    for the limit, the watchdog writes one report to standard error and to `report_path`, then exits with code 17.

    A call into C that never returns and keeps the interpreter's lock stops the watchdog's thread too. So it also keeps
    a timer of `faulthandler` armed, which needs no lock: `gil_slack_s` past the limit it prints the stacks and exits
    with code 1.

    Attributes:
        who: the rank in words, for example `rank 3 (language grid tp 1 dp 0 pp 0, lane 0)`.
        current_wait: innermost open wait.
        last_change: monotonic time of the last progress or transition, seconds.
        iteration, microbatch: the last ones told; None before the first.
        at_stall: called after the report of a stall, each for a few seconds at most.
    """

    def __init__(self, timeout_s: float, who: str, *, report_path: Path | None = None,
                 gil_slack_s: float = 30.0) -> None:
        """Start watching.

        Args:
            timeout_s: seconds without progress that are a stall; 0 or less never is one.
            who: the rank in words.
            report_path: where the report goes besides standard error, for example `run_dir/stall-rank3.txt`.
            gil_slack_s: seconds past the limit after which the interpreter's lock must be stuck.
        """
        self.who = who
        self.current_wait: Wait | None = None
        self.last_change = time.monotonic()
        self.iteration: int | None = None
        self.microbatch: int | None = None
        self.at_stall: list[Callable[[], None]] = []
        self._timeout_s = timeout_s if timeout_s > 0 else math.inf
        self._extra_s = 0.0
        self._report_path = report_path
        self._gil_slack_s = gil_slack_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def progress(self, *, iteration: int | None = None, microbatch: int | None = None) -> None:
        """Tell that work moved on. A new iteration without a microbatch forgets the last one's."""
        if iteration is not None:
            self.iteration = iteration
            self.microbatch = None
        if microbatch is not None:
            self.microbatch = microbatch
        self.last_change = time.monotonic()

    def waiting(self, what: str, **details: object) -> Wait:
        """Context of a wait for others: `with watchdog.waiting("bridge recv_forward", peer="vision rank 0", lane=1):`.

        Nestable; the report names every open wait. Details that are None are left out.
        """
        return Wait(self, what, details)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Context of a phase that may go `seconds` without progress, such as a checkpoint; never shortens a limit.

        `math.inf` pauses the watchdog.
        """
        outer = self._extra_s
        self._extra_s = max(outer, seconds)
        self.last_change = time.monotonic()
        try:
            yield
        finally:
            # In this order, the reverse of `time_left`'s: the shorter limit must never meet the phase's own age.
            self.last_change = time.monotonic()
            self._extra_s = outer

    def time_left(self, usual_s: float, since: float = -math.inf) -> float:
        """Seconds until the main thread has gone too long without progress.

        Args:
            usual_s: limit outside `limit` contexts.
            since: monotonic time before which idleness does not count.
        """
        allowed_s = max(usual_s, self._extra_s)
        return allowed_s - (time.monotonic() - max(since, self.last_change))

    def describe(self) -> str:
        """Where the main thread is: rank, step, microbatch and every open wait, innermost first."""
        now = time.monotonic()
        parts = [f"{self.who}: no progress for {now - self.last_change:.1f} s"]
        if self.iteration is not None:
            parts.append(f"iteration {self.iteration}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        wait = self.current_wait
        text = ", ".join(parts) + ("" if wait is not None else "; in no announced wait")
        joint = "; waiting for "
        while wait is not None:
            text += joint + wait.describe(now)
            joint, wait = "; inside ", wait.outer
        return text

    def report(self, headline: str) -> None:
        """Write `headline`, where the main thread is and all stacks to standard error and `report_path`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        write_report(f"{headline} on {self.describe()} [{stamp}]\n{thread_stacks()}", self._report_path)

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            left_s = self.time_left(self._timeout_s)
            if left_s <= 0:
                faulthandler.cancel_dump_traceback_later()
                self.report("stall")
                for action in self.at_stall:
                    within_limit(action)
                exit_now(STALL_EXIT_CODE)
            if math.isinf(left_s):
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(left_s + POLL_S + self._gil_slack_s, exit=True, file=STDERR_FD)
            pause_s = min(POLL_S, left_s)
        faulthandler.cancel_dump_traceback_later()
