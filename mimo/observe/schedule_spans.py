"""Passes and transfers of the wheel's schedules, seen from the seams that these have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mimo.observe.spans import Kind, Spans
from mimo.observe.stall_status import Schedule


class ScheduleSpans:
    """What the wheel takes for `config.timers`: it starts and stops timers by name around passes and transfers.

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
        """The wheel's timer of that name."""
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
    """One timer, with the wheel's arguments."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def start(self, barrier: bool = False) -> None:
        """Begin the stretch; `barrier` is the wheel's and not honoured: nothing waits for a measurement."""
        self._begin()

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        self._end()


def _nothing() -> None:
    pass


_NO_TIMER = _Timer(_nothing, _nothing)
