"""Named wall-clock accumulators for one training step."""

from __future__ import annotations

import time


class Timer:
    """Seconds spent inside `with` blocks. Entered again while running, the outermost block alone counts."""

    __slots__ = ("seconds", "_depth", "_start")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._start = 0.0

    def __enter__(self) -> Timer:
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start


class Timers:
    """Accumulators by name: `with timers("bridge wait"): ...`.

    They measure host time and never synchronise the device, so work that is only queued inside a block is not counted.
    Used from one thread.
    """

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The accumulator called `name`, created on first use."""
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = Timer()
        return timer

    def snapshot(self) -> dict[str, float]:
        """Seconds by name since the last `reset`; a block still open is not included."""
        return {name: timer.seconds for name, timer in self._timers.items()}

    def reset(self) -> None:
        """Zero every accumulator. Names stay, so a step without a wait reports 0."""
        for timer in self._timers.values():
            timer.seconds = 0.0
