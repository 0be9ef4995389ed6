"""Time that the device spent between two points, read once a step so that nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceTimer:
    """Sums the time between pairs of events on the current stream; under CPU emulation events are wall clocks."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time what the block queues on the current stream."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._pairs.append((begin, end))

    def drain_s(self, *, wait: bool = True) -> float:
        """Seconds since the last call. Call after the device has finished the step (its results were read).

        Args:
            wait: for what is not finished all the same; else that counts in a later call.
        """
        seconds, left = 0.0, []
        for begin, end in self._pairs:
            if wait:
                end.synchronize()
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                left.append((begin, end))
        self._pairs = left
        return seconds
