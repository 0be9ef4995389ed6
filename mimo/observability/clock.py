"""Clocks and timers of the device that do not wait for it, and the differences between the clocks of hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Round trips for comparing two hosts' clocks; only the fastest one counts.
NUM_ROUND_TRIPS = 8


class HostClock:
    """Takes timestamps of the host's own clock: on a CPU operations and collectives end before they return."""

    def start(self) -> None:
        """Begin a step. Timestamps of the step before can no longer be read."""

    def mark(self) -> Any:
        return time.monotonic()

    def seconds(self, marks: list[Any]) -> list[float]:
        """Convert timestamps of the step, `marks[0]` being the first, to seconds of the host's monotonic clock."""
        return marks

    def lead_s(self, mark: Any, reached_s: float) -> float | None:
        """Return how many seconds before the device reached a timestamp the host had queued it; None on a CPU.

        `reached_s` is what `seconds` returned for it.
        """
        return None


class DeviceClock(HostClock):
    """Events on the compute stream. The host does not wait for them, and a stalled stream shows as a gap.

    The first event of a step is assumed to happen when it is queued, because the device is idle at the end of a step.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._began_s = 0.0

    def start(self) -> None:
        self._used = 0  # events are reused from the first one on
        self._began_s = time.monotonic()

    def mark(self) -> tuple[torch.cuda.Event, float]:
        """Queue an event. Returns it and when the host has queued it."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event, time.monotonic()

    def seconds(self, marks: list[Any]) -> list[float]:
        """Return when the stream reached the events. Waits for the last one."""
        (first, _), (last, _) = marks[0], marks[-1]
        last.synchronize()
        return [self._began_s + first.elapsed_time(event) / 1000 for event, _ in marks]

    def lead_s(self, mark: Any, reached_s: float) -> float:
        return reached_s - float(mark[1])


def host_of_clock() -> str:
    """Return the id of the running kernel. Processes with the same id share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def clock_offsets(hosts: list[str], rank: int, group: dist.ProcessGroup) -> list[float]:
    """Return the seconds to add to each rank's monotonic clock to get that of rank 0. Collective over `group`.

    The first rank of each host asks rank 0 for the time (Cristian's algorithm). The fastest of several answers is
    assumed to be from the middle of its round trip, so that the error is at most half of the round trip. `hosts` has
    the `host_of_clock` of every rank.
    """
    askers = [hosts.index(host) for host in dict.fromkeys(hosts)][1:]
    offset = torch.zeros(1, dtype=torch.float64)
    for asker in askers:
        if rank == asker:
            offset[0] = _ask(group)
        elif rank == 0:
            _answer(asker, group)
    found = [torch.zeros(1, dtype=torch.float64) for _ in hosts]
    dist.all_gather(found, offset, group=group)
    return [found[hosts.index(host)].item() for host in hosts]


def _ask(group: dist.ProcessGroup) -> float:
    fastest_s, offset, message = float("inf"), 0.0, torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_ROUND_TRIPS):
        asked = time.monotonic()
        dist.send(message, group_dst=0, group=group)
        dist.recv(message, group_src=0, group=group)
        answered = time.monotonic()
        if answered - asked < fastest_s:
            fastest_s, offset = answered - asked, message.item() - (asked + answered) / 2
    return offset


def _answer(asker: int, group: dist.ProcessGroup) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_ROUND_TRIPS):
        dist.recv(message, group_src=asker, group=group)
        message[0] = time.monotonic()
        dist.send(message, group_dst=asker, group=group)


class DeviceTimer:
    """Sums the time between pairs of events on the current stream. Under CPU emulation events are wall clocks."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what the block queues on the current stream."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._pairs.append((begin, end))

    def drain_s(self, *, wait: bool = True) -> float:
        """Return the seconds measured since the last call. Call this after the results of the step were read.

        Work that has not finished counts in a later call, unless this waits for it.
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
