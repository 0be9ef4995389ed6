"""Progress display for file copies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from stage_files.children import Task

# Seconds between two lines of output.
SHOW_S = 10.0


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
                self.say(f"{task.name}: {format_gb(answer['done']['kept'])} were there of a copy that broke off")
            if time.monotonic() - self._shown > SHOW_S:
                self._shown = time.monotonic()
                done = sum(self._done.values())
                rate = format_gb(done / (self._shown - self._began))
                self.say(f"{format_gb(done)} of {format_gb(self.total)}, {rate}/s")
            yield task, answer
