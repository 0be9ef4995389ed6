"""Comparison of mathematical expressions, on any thread and with a time limit; see `expression_worker`."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from mimo.rl.rewards import expression_worker

# Seconds for a comparison, and for the first one, which has to wait until SymPy is imported.
LIMIT_S = 15.0
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        known: whether the wanted text is an expression.
        equal: whether the found text is equal to it. A text that takes too long to read is not.
    """

    known: bool
    equal: bool


class Comparer:
    """Compares in a process, which is started when it is first needed and again after it had to be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, wanted: str, found: str, limit_s: float | None = None) -> Comparison:
        """Compare two texts with expressions.

        Args:
            wanted: the right answer.
            found: the answer to compare with it.
            limit_s: time limit in seconds; None for `LIMIT_S`.

        Raises:
            RuntimeError: the process does not start.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            answer = None
            try:
                process.stdin.write(json.dumps({"wanted": wanted, "found": found}) + "\n")
                process.stdin.flush()
                answer = _line(process, LIMIT_S if limit_s is None else limit_s)
            except BrokenPipeError:
                pass  # the process has ended: it ran out of memory or reached its own limit
            if answer is None:
                self._kill()
                # It is not known whether `wanted` is an expression. The next completion asks that again.
                return Comparison(known=True, equal=False)
            return Comparison(**json.loads(answer))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen([sys.executable, "-P", expression_worker.__file__], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if _line(self._process, START_LIMIT_S) is None:
            self._kill()
            raise RuntimeError(f"math-verify did not start within {START_LIMIT_S:g} s: "
                               f"{sys.executable} {expression_worker.__file__}")
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _line(process: subprocess.Popen[Any], limit_s: float) -> str | None:
    """Return the next line that a process writes; None if there is none in time."""
    deadline = time.monotonic() + limit_s
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return None
    return process.stdout.readline() or None


_COMPARER = Comparer()


def compare(wanted: str, found: str) -> Comparison:
    r"""Compare two texts with expressions, such as `$\frac{1}{2}$` and `0.5`; see `Comparer.compare`."""
    return _COMPARER.compare(wanted, found)
