"""Comparison of mathematical expressions with the package math-verify, on any thread and with a time limit.

SymPy never returns from some inputs, and math-verify's own time limit is a signal, which only reaches the main thread
of a process. Therefore a process of its own compares: this file, run as a program. Its starter may wait on any thread,
and kills it if it takes too long. The file imports nothing from this project, so that the process starts fast.

A request is a line of JSON on standard input with the texts `wanted` and `found`. The answer is a line of JSON with
`known`, whether `wanted` is an expression, and `equal`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import resource
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

# Seconds for a comparison, and for the first one, which has to wait until SymPy is imported.
LIMIT_S = 15.0
START_LIMIT_S = 120.0
# Seconds after which math-verify's signal gives up on an expression, and after which the process ends if that fails.
SIGNAL_S, END_S = 5, 30
MEMORY_BYTES = 8 << 30


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

    def compare(self, wanted: str, found: str, limit_s: float = LIMIT_S) -> Comparison:
        """Compare two texts with expressions.

        Args:
            wanted: the right answer.
            found: the answer to compare with it.
            limit_s: time limit in seconds.

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
                answer = _line(process, limit_s)
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
        # In a session of its own, because a signal that asks the run to stop goes to the whole process group. The run
        # finishes its iteration, for which it needs the rewards.
        self._process = subprocess.Popen([sys.executable, "-P", __file__], text=True, start_new_session=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if _line(self._process, START_LIMIT_S) is None:
            self._kill()
            raise RuntimeError(f"math-verify did not start within {START_LIMIT_S:g} s: {sys.executable} {__file__}")
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _line(process: subprocess.Popen[Any], limit_s: float) -> str | None:
    """Return the next line that a process writes; None if there is none in time."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit_s)[0]:
        return None
    return process.stdout.readline() or None


_COMPARER = Comparer()


def compare(wanted: str, found: str) -> Comparison:
    r"""Compare two texts with expressions, such as `$\frac{1}{2}$` and `0.5`; see `Comparer.compare`."""
    return _COMPARER.compare(wanted, found)


def serve() -> None:
    """Answer requests until there are no more."""
    # The starter expects nothing but answers, and ANTLR prints a warning if another version of it is installed.
    answers, sys.stdout = sys.stdout, sys.stderr
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The process ends by itself in case its starter is gone and does not kill it.
        faulthandler.dump_traceback_later(END_S, exit=True)
        wanted = parse(request["wanted"], parsing_timeout=SIGNAL_S)
        equal = bool(wanted) and verify(wanted, parse(request["found"], parsing_timeout=SIGNAL_S),
                                        timeout_seconds=SIGNAL_S)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"known": bool(wanted), "equal": bool(equal)}), file=answers, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    serve()
