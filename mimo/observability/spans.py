"""Named stretches of a rank's step: the one seam through which timeline, profiler and NVTX see it.

Code says where it is with `spans.span(Kind.BRIDGE_WAIT, "receive")`. Of what it says, the timeline keeps the moments at
which the innermost stretch changed, so a step falls apart into intervals without gap or overlap: a wait inside a
forward pass counts as a wait and not as a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mimo.watchdog.status import Schedule


class Kind(StrEnum):
    """What a stretch of a step is for; the names are those of the figures.

    Attributes:
        FORWARD, BACKWARD: passes of a microbatch: what the rank is there for. Collectives inside a layer (tensor,
            context, expert parallel) and gradient reductions that overlap with a pass are part of it.
        BRIDGE_WAIT: sending and receiving activations and gradients between grids.
        PIPELINE_WAIT: the same between stages of a grid, its bubble included.
        DATA_WAIT: for the loader.
        GRADIENT_SYNC: what is left of the gradients' reduction after the last pass.
        OPTIMIZER: gradient norm and update.
        IDLE: waiting where all ranks meet, at both ends of a step and inside the update.
        OTHER: the rest.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BRIDGE_WAIT = "bridge-wait"
    PIPELINE_WAIT = "pipeline-wait"
    DATA_WAIT = "data-wait"
    GRADIENT_SYNC = "gradient-sync"
    OPTIMIZER = "optimizer"
    IDLE = "idle"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Label:
    """What a rank does during a stretch.

    Attributes:
        kind: of the stretch.
        name: in words, for example `receive activations`.
        module: whose work it is.
        microbatch: index in the step; None for what has none.
    """

    kind: Kind
    name: str
    module: str
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch in which nothing changed; `begin_s` and `end_s` are seconds on the host's monotonic clock."""

    label: Label
    begin_s: float
    end_s: float


Range = Callable[[str], AbstractContextManager[Any]]
"""Opens a range of a profiler, by its name."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class Spans:
    """What one rank is doing, for whoever listens. Without a listener a call costs a comparison.

    Calls come from one thread at a time: the main thread, or autograd's while the main one waits for it.

    Attributes:
        module: the module that stretches without one of their own belong to.
        enabled: whether `begin_step` records; changed between steps only.
        ranges: opened around every stretch; changed by `listen`.
    """

    def __init__(self, clock: Clock | None = None, stages: Mapping[str, int] | None = None) -> None:
        """Listen to nothing yet.

        Args:
            clock: what steps are recorded with; None for never.
            stages: pipeline stage of each module of this rank, the one that unnamed stretches belong to last.
        """
        self._clock = clock
        self._stages = dict(stages or {})
        self.module = next(reversed(self._stages), "")
        self._root = Label(Kind.OTHER, "step", self.module)
        self._stack = [self._root]
        self._marks: list[tuple[Any, Label]] = []
        self.enabled = clock is not None
        self._recording = False
        self.ranges: tuple[Range, ...] = ()
        self._open: list[list[AbstractContextManager[Any]]] = []

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return self._recording or bool(self.ranges)

    def span(self, kind: Kind, name: str, *, module: str | None = None,
             microbatch: int | None = None) -> AbstractContextManager[Any]:
        """Context of a stretch. Inside another one; what is left out is as there."""
        return _Span(self, kind, name, module, microbatch) if self.active else _NOTHING

    def begin(self, kind: Kind, name: str, module: str | None = None, microbatch: int | None = None) -> None:
        """Begin a stretch, which `end` ends. Only where somebody listens (`active`)."""
        outer = self._stack[-1]
        label = Label(kind, name, module or outer.module, outer.microbatch if microbatch is None else microbatch)
        self._stack.append(label)
        if self.ranges:
            opened = [make(self.text(label)) for make in self.ranges]
            for each in opened:
                each.__enter__()
            self._open.append(opened)
        if self._clock is not None and self._recording:
            self._marks.append((self._clock.mark(), label))

    def end(self) -> None:
        """End the innermost stretch."""
        self._stack.pop()
        if self._clock is not None and self._recording:
            self._marks.append((self._clock.mark(), self._stack[-1]))
        if self.ranges:
            for each in reversed(self._open.pop()):
                each.__exit__(None, None, None)

    def switch(self, module: str) -> None:
        """The innermost stretch goes on as another module's, for the timeline.

        Profilers keep its range: ranges begin and end on one thread, and here that of autograd may be calling.
        """
        label = self._stack[-1]
        if self._clock is None or not self._recording or label.module == module:
            return
        self._stack[-1] = replace(label, module=module)
        self._marks.append((self._clock.mark(), self._stack[-1]))

    def text(self, label: Label) -> str:
        """A label as profilers show it: `language stage 1 forward microbatch 3`."""
        words = [label.module, f"stage {self._stages[label.module]}"] if label.module in self._stages else []
        words.append(label.name)
        if label.microbatch is not None:
            words.append(f"microbatch {label.microbatch}")
        return " ".join(words)

    def listen(self, *ranges: Range) -> None:
        """Open these ranges around every stretch from now on, instead of earlier ones. Between steps."""
        assert len(self._stack) == 1, f"inside {self._stack[-1]}"
        self.ranges = ranges

    def begin_step(self) -> None:
        """Record from here on, if that is enabled."""
        self._stack, self._marks, self._open = [self._root], [], []
        if self._clock is not None and self.enabled:
            self._recording = True
            self._clock.start()
            self._marks.append((self._clock.mark(), self._root))

    def end_step(self) -> None:
        """Record no longer."""
        assert len(self._stack) == 1, f"the step ended inside {self._stack[-1]}"
        if self._clock is not None and self._recording:
            self._marks.append((self._clock.mark(), self._root))
            self._recording = False

    def intervals(self) -> list[Interval]:
        """The last recorded step, in order: each begins where the one before ends.

        Waits for the device, if it has not finished the step.
        """
        if self._clock is None or len(self._marks) < 2:
            return []
        times = self._clock.seconds([mark for mark, _ in self._marks])
        found = []
        for index, (_, label) in enumerate(self._marks[:-1]):
            found.append(Interval(label, times[index], times[index + 1]))
        return found


class _Span:
    """The context that `Spans.span` returns."""

    __slots__ = ("_spans", "_label")

    def __init__(self, spans: Spans, kind: Kind, name: str, module: str | None, microbatch: int | None) -> None:
        self._spans = spans
        self._label = (kind, name, module, microbatch)

    def __enter__(self) -> None:
        self._spans.begin(*self._label)

    def __exit__(self, *exc_info: object) -> None:
        self._spans.end()


# Moments of a step: taken without waiting for the device, read after it; and what hosts' clocks differ by.


# Round trips of a comparison of two hosts' clocks; the fastest one counts.
NUM_ROUND_TRIPS = 8


class Clock(Protocol):
    """Takes moments."""

    def start(self) -> None:
        """Begin a step; moments of the one before can no longer be read."""
        ...

    def mark(self) -> Any:
        """This moment."""
        ...

    def seconds(self, marks: list[Any]) -> list[float]:
        """Moments of the step, its first one foremost, in seconds on the host's monotonic clock."""
        ...


class HostClock:
    """The host's own clock: on a CPU operations and collectives end before they return."""

    def start(self) -> None:
        """Nothing to prepare."""

    def mark(self) -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def seconds(self, marks: list[Any]) -> list[float]:
        """The moments themselves."""
        return marks


class DeviceClock:
    """Events on the stream that computes: the host goes on, and a stalled stream shows as a gap.

    The first event of a step is taken to happen when it is queued: the trainer's steps end with the device drained.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._began_s = 0.0

    def start(self) -> None:
        """Use the events anew."""
        self._used = 0
        self._began_s = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        """When the stream reached the events; waits for the last one."""
        first, last = marks[0], marks[-1]
        last.synchronize()
        return [self._began_s + first.elapsed_time(mark) / 1000 for mark in marks]


def host_of_clock() -> str:
    """Names the kernel whose monotonic clock this process reads: processes with one name share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def clock_offsets(hosts: list[str], rank: int, group: dist.ProcessGroup) -> list[float]:
    """What to add to each rank's monotonic clock to get that of rank 0, seconds. Collective over `group`.

    The first rank of each host asks rank 0 for the time, as in Cristian's algorithm: of several answers the fastest is
    taken to have been given in the middle of its round trip. The error is at most half of that.

    Args:
        hosts: `host_of_clock` of every rank.
        rank: this one, global and in the group.
        group: gloo group of the whole world.
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


# Time that the device spent between two points, read once a step so that nothing waits for it.


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


# Passes and transfers of Megatron Core's schedules, seen from the seams that these have.


class ScheduleSpans:
    """What Megatron Core takes for `config.timers`: it starts and stops timers by name around passes and transfers.

    Backward passes of the schedule over several modules have no timer. They are what happens between the arrival of a
    gradient and the departure of the next one, so the communicator tells of them.

    Args:
        spans: told of every stretch.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self._forward = self._backward = 0
        self._begun = self._num_microbatches = 0
        self._in_backward = False
        self._timers = {
            "forward-compute": _Timer(self._begin_forward, self._end_forward),
            "backward-compute": _Timer(self.begin_backward, self.end_backward),
        }
        transfers = {
            "forward-recv": ("recv_forward", lambda: self._forward),
            "forward-send": ("send_forward", lambda: self._forward - 1),
            "backward-recv": ("recv_backward", lambda: self._backward),
            "backward-send": ("send_backward", lambda: self._backward - 1),
            "forward-send-backward-recv": ("send_forward_recv_backward", lambda: self._backward),
            "backward-send-forward-recv": ("send_backward_recv_forward", lambda: self._forward),
        }
        for name, (words, microbatch) in transfers.items():
            self._timers[name] = _Timer(partial(self._begin_transfer, words, microbatch), self._end)

    def begin(self, num_microbatches: int) -> None:
        """The schedule starts over with the first microbatch."""
        self._begun += 1
        self._num_microbatches = num_microbatches
        self._forward = self._backward = 0
        self._in_backward = False

    def status(self) -> Schedule | None:
        """Where the schedule is, None before the first; asked from another thread."""
        if not self._begun:
            return None
        return Schedule(self._begun, self._num_microbatches, self._forward, self._backward)

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Megatron Core's timer of that name."""
        return self._timers.get(name, _NO_TIMER)

    def begin_backward(self) -> None:
        """The backward pass of the next microbatch starts."""
        if self.spans.active:
            self._in_backward = True
            self.spans.begin(Kind.BACKWARD, "backward", self.spans.module, self._backward)

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._backward += 1
        if self._in_backward:
            self._in_backward = False
            self.spans.end()

    def _begin_forward(self) -> None:
        if self.spans.active:
            self.spans.begin(Kind.FORWARD, "forward", self.spans.module, self._forward)

    def _end_forward(self) -> None:
        self._forward += 1
        self._end()

    def _begin_transfer(self, words: str, microbatch: Callable[[], int]) -> None:
        if self.spans.active:
            self.spans.begin(Kind.PIPELINE_WAIT, words, self.spans.module, microbatch())

    def _end(self) -> None:
        if self.spans.active:
            self.spans.end()


class _Timer:
    """One timer, with Megatron Core's arguments."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def start(self, barrier: bool = False) -> None:
        """Begin the stretch; `barrier` is Megatron Core's and not honoured: nothing waits for a measurement."""
        self._begin()

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        self._end()


def _nothing() -> None:
    pass


_NO_TIMER = _Timer(_nothing, _nothing)
