"""Named stretches of a rank's step, for the timeline, the profiler and NVTX.

Code marks a stretch with `spans.span(Kind.BRIDGE_WAIT, "receive")`, or with `trace.wait` if the watchdog should know of
it, too. The timeline records when the innermost stretch changes. It thus divides a step into intervals without gap or
overlap: a wait inside a forward pass counts as a wait and not as a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from mimo.watchdog.status import Schedule

if TYPE_CHECKING:
    from mimo.observability.clock import HostClock
    from mimo.watchdog.watchdog import Watchdog


class Kind(StrEnum):
    """Purpose of a stretch of a step; the metrics use the same names.

    Attributes:
        FORWARD, BACKWARD: passes of a microbatch, the rank's real work. They include collectives inside a layer
            (tensor, context, expert parallel) and gradient reductions that overlap with a pass.
        BRIDGE_WAIT: sending and receiving activations and gradients between grids.
        PIPELINE_WAIT: the same between stages of a grid, with the pipeline bubble.
        DATA_WAIT: waiting for the loader.
        GRADIENT_SYNC: the part of the gradients' reduction that remains after the last pass.
        OPTIMIZER: gradient norm and update.
        IDLE: waiting for other ranks where all ranks synchronise, at both ends of a step and inside the update.
        OTHER: everything else.
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
    """Description of a stretch.

    Attributes:
        kind: purpose of the stretch.
        name: the stretch in words, for example `receive activations`.
        module: module that the work is for.
        microbatch: index in the step; None for work of no single microbatch.
    """

    kind: Kind
    name: str
    module: str
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """Part of a stretch without another one inside.

    Attributes:
        label: the stretch.
        begin_s, end_s: seconds of the host's monotonic clock.
        lead_s: how far the host was ahead of the device at the end, seconds; None on a CPU.
    """

    label: Label
    begin_s: float
    end_s: float
    lead_s: float | None = None


Range = Callable[[str], AbstractContextManager[Any]]
"""Opens a range of a profiler, by its name."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class Spans:
    """Records what one rank is doing, if there is a listener. Otherwise a call costs only a comparison.

    Only one thread calls at a time: the main thread, or autograd's while the main thread waits for it.

    Attributes:
        module: module of stretches that do not name one.
        enabled: whether `begin_step` records; may change between steps only.
        ranges: ranges that are opened around every stretch; set by `listen`.
    """

    def __init__(self, clock: HostClock | None = None, stages: Mapping[str, int] | None = None) -> None:
        """Listen to nothing yet.

        Args:
            clock: clock for recording steps; None never records.
            stages: pipeline stage of each module of this rank. The last module is that of stretches without one.
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
        """Whether there is a listener."""
        return self._recording or bool(self.ranges)

    def span(self, kind: Kind, name: str, *, module: str | None = None,
             microbatch: int | None = None) -> AbstractContextManager[Any]:
        """Context of a stretch. Module and microbatch default to those of the stretch around it."""
        return self._stretch(kind, name, module, microbatch) if self.active else _NOTHING

    @contextmanager
    def _stretch(self, *label: Any) -> Iterator[None]:
        self.begin(*label)
        try:
            yield
        finally:
            self.end()

    def begin(self, kind: Kind, name: str, module: str | None = None, microbatch: int | None = None) -> None:
        """Begin a stretch, which `end` ends. Call this only if `active`."""
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
        """Assign the rest of the innermost stretch to another module, for the timeline.

        Ranges of profilers stay as they are: they must begin and end on one thread, and autograd's may call this.
        """
        label = self._stack[-1]
        if self._clock is None or not self._recording or label.module == module:
            return
        self._stack[-1] = replace(label, module=module)
        self._marks.append((self._clock.mark(), self._stack[-1]))

    def text(self, label: Label) -> str:
        """Format a label for profilers: `language stage 1 forward microbatch 3`."""
        words = [label.module, f"stage {self._stages[label.module]}"] if label.module in self._stages else []
        words.append(label.name)
        if label.microbatch is not None:
            words.append(f"microbatch {label.microbatch}")
        return " ".join(words)

    def listen(self, *ranges: Range) -> None:
        """Open these ranges around every stretch from now on, in place of earlier ones. Call this between steps."""
        assert len(self._stack) == 1, f"inside {self._stack[-1]}"
        self.ranges = ranges

    def begin_step(self) -> None:
        """Begin to record, if that is enabled."""
        self._stack, self._marks, self._open = [self._root], [], []
        if self._clock is not None and self.enabled:
            self._recording = True
            self._clock.start()
            self._marks.append((self._clock.mark(), self._root))

    def end_step(self) -> None:
        assert len(self._stack) == 1, f"the step ended inside {self._stack[-1]}"
        if self._clock is not None and self._recording:
            self._marks.append((self._clock.mark(), self._root))
            self._recording = False

    def intervals(self) -> list[Interval]:
        """Return the intervals of the last recorded step. Each begins where the one before ends.

        This waits for the device to finish the step.
        """
        if self._clock is None or len(self._marks) < 2:
            return []
        times = self._clock.seconds([mark for mark, _ in self._marks])
        found = []
        for index, (_, label) in enumerate(self._marks[:-1]):
            end_s = times[index + 1]
            found.append(Interval(label, times[index], end_s, self._clock.lead_s(self._marks[index + 1][0], end_s)))
        return found


@dataclass(frozen=True)
class Trace:
    """Tells the watchdog and the timeline together what this rank waits for."""

    watchdog: Watchdog
    spans: Spans

    @contextmanager
    def wait(self, what: str, kind: Kind = Kind.IDLE, *, module: str | None = None, microbatch: int | None = None,
             **report: Any) -> Iterator[None]:
        """Context of a wait: `with trace.wait("data", Kind.DATA_WAIT, on_loader=True):`.

        Args:
            what: name of the wait, without details that differ from rank to rank.
            kind: kind of the wait in the timeline.
            module: module that waits; the default in the timeline is that of the stretch around it.
            microbatch: index in the step, with the same default.
            report: details for the watchdog's report, see `Watchdog.waiting`.
        """
        with (self.watchdog.waiting(what, module=module, microbatch=microbatch, **report),
              self.spans.span(kind, what, module=module, microbatch=microbatch)):
            yield


class ScheduleSpans:
    """Stand-in for `config.timers`, whose timers Megatron Core starts and stops by name around passes and transfers.

    Backward passes of the schedule over several modules have no timer. They happen between the arrival of a gradient
    and the departure of the next one, so the communicator reports them.
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
        """Begin a schedule, at its first microbatch."""
        self._begun += 1
        self._num_microbatches = num_microbatches
        self._forward = self._backward = 0
        self._in_backward = False

    def status(self) -> Schedule | None:
        """Return the progress of the schedule, None before the first. The watchdog's thread calls this."""
        if not self._begun:
            return None
        return Schedule(self._begun, self._num_microbatches, self._forward, self._backward)

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return Megatron Core's timer of that name."""
        return self._timers.get(name, _NO_TIMER)

    def begin_backward(self) -> None:
        """Begin the backward pass of the next microbatch."""
        if self.spans.active:
            self._in_backward = True
            self.spans.begin(Kind.BACKWARD, "backward", self.spans.module, self._backward)

    def end_backward(self) -> None:
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
    """Timer with the interface of Megatron Core's."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def start(self, barrier: bool = False) -> None:
        """Begin the stretch. `barrier` is ignored, because a measurement must not make ranks wait."""
        self._begin()

    def stop(self, barrier: bool = False) -> None:
        self._end()


_NO_TIMER = _Timer(lambda: None, lambda: None)
