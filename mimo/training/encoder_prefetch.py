"""Features of coming microbatches, computed by a frozen encoder while its rank waits for others.

A frozen encoder gives the same features in any step. So a rank that waits for a gradient, or for the end of the step,
can run the encoder on microbatches that come later, those of coming iterations included; what follows it (the
projector) runs in the microbatch's own forward pass.

Where this happens is fixed in the program: in every transfer of the bridge, once its messages are under way, and where
all ranks sum up the step. So the ranks of a replica run the same microbatches in the same order, and with them the
tensor-parallel collectives of these. (The published `encoder_prefetch` of Megatron-LM's examples/mimo starts it from a
thread, and takes no tensor parallelism.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mimo.data.batch import EncoderBatch, Microbatch
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, Trace

if TYPE_CHECKING:
    from mimo.model.submodule import VisionSubmodule


@dataclass(frozen=True)
class Upcoming:
    """A microbatch whose features are still to be computed.

    Attributes:
        side: on the host.
        index: of the microbatch in its iteration.
        ahead: whether that is a coming one.
    """

    side: EncoderBatch
    index: int
    ahead: bool


@dataclass(frozen=True)
class QueuedMicrobatch:
    """Features in the queue.

    Attributes:
        keys: sample keys of the microbatch.
        features: as `VisionSubmodule.run_encoder`; None without images.
        ready: when they are computed, where that is on a stream of their own.
    """

    keys: tuple[str, ...]
    features: torch.Tensor | None
    ready: torch.cuda.Event | None


class EncoderPrefetch:
    """The queue of one rank's encoder. While a step is under way, all its microbatches take their features from here.

    On a GPU the encoder may have a stream of its own. The queue then holds `depth` microbatches in the device's time,
    too: however far the host is ahead, the encoder starts on one only when the compute stream has taken a copy of the
    features that were computed `depth` before it.

    Args:
        module: the encoder's name.
        submodule: the encoder, frozen, and its projector, on the only pipeline stage.
        depth: microbatches with images in the queue at most, from 1 on.
        device: of the encoder.
        own_stream: run it on a stream of its own; else where it is called. Not where kernels share memory whatever
            their stream, as matrix products of Transformer Engine do (one workspace a device).
        trace: told where the rank is.

    Attributes:
        active: a training step is under way.
    """

    def __init__(self, module: str, submodule: VisionSubmodule, *, depth: int, device: torch.device, own_stream: bool,
                 trace: Trace) -> None:
        assert depth >= 1 and submodule.is_first_stage and submodule.is_last_stage, (module, depth)
        self._module, self._submodule, self._depth, self._device = module, submodule, depth, device
        self._trace = trace
        self._stream = torch.cuda.Stream(device) if own_stream else None
        self._queue: deque[QueuedMicrobatch] = deque()
        self._upcoming: deque[Upcoming] = deque()
        # Features that the compute stream copies, and when it is through: their memory is the encoder's stream's.
        self._copied: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._timer = DeviceTimer()
        self.active = False

    def begin_step(self, microbatches: Sequence[Microbatch],
                   coming: Sequence[Sequence[Microbatch]] = ()) -> list[Microbatch]:
        """A step begins.

        Args:
            microbatches: its microbatches, on the host.
            coming: those of the iterations after it, as far as they may be looked at; the same on all ranks of a
                replica, and later steps have to be these.

        Returns:
            The step's microbatches without what the encoder reads of them: that does not go to the device twice.
        """
        if self._stream is not None:
            # Weights may have been written since; in a training step itself they are not.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        upcoming = [Upcoming(batch.encoders[self._module], index, ahead=number > 0)
                    for number, step in enumerate((microbatches, *coming)) for index, batch in enumerate(step)]
        for entry, expected in zip(self._queue, upcoming, strict=False):
            assert entry.keys == expected.side.keys, f"features of {entry.keys}, but {expected.side.keys} come next"
        self._upcoming = deque(upcoming[len(self._queue):])
        self.active = True
        return [replace(batch, encoders=batch.encoders | {self._module: replace(batch.encoders[self._module],
                                                                               inputs={})})
                for batch in microbatches]

    def end_step(self) -> None:
        """The step's passes are over; what is in the queue stays for those that come."""
        self.active = False
        self._upcoming.clear()

    def launch(self) -> None:
        """Run the encoder on the next microbatch with images, if a step is under way and the queue has room."""
        while self._has_more and not self._run_next(prefetched=True):
            pass

    def fill(self) -> None:
        """Run the encoder until the queue is full."""
        while self._has_more:
            self._run_next(prefetched=True)

    def drain_s(self) -> float:
        """Seconds of the device since the last call in `launch` and `fill`; what it has not finished counts later."""
        return self._timer.drain_s(wait=False)

    @property
    def num_held(self) -> int:
        """Microbatches whose features are in the queue; one without images has none."""
        return sum(entry.features is not None for entry in self._queue)

    @property
    def _has_more(self) -> bool:
        return self.active and bool(self._upcoming) and self.num_held < self._depth

    def take(self, side: EncoderBatch) -> torch.Tensor | None:
        """The features of a microbatch of the step, in order; where none were computed ahead, they are now.

        Args:
            side: the next microbatch.

        Returns:
            `[images, tokens, features]`, packed `[1, tokens, features]`; None without images.
        """
        # On a GPU this is how long the compute stream waits for the encoder's.
        with self._trace.spans.span(Kind.FORWARD, "encoder"):
            if not self._queue:
                self._run_next(prefetched=False)
            entry = self._queue.popleft()
            assert entry.keys == side.keys, f"features of {entry.keys} for {side.keys}"
            return self._handed_over(entry)

    def _run_next(self, *, prefetched: bool) -> bool:
        """Compute the next features and queue them; returns whether the encoder ran."""
        upcoming = self._upcoming.popleft()
        if not upcoming.side.inputs:
            self._queue.append(QueuedMicrobatch(upcoming.side.keys, None, None))
            return False
        what = "encoder prefetch" if prefetched else "encoder"
        if upcoming.ahead:
            what += " of a coming iteration"
        with (self._trace.wait(what, Kind.FORWARD, module=self._module, microbatch=upcoming.index, is_work=True),
              self._on_own_stream(), self._timer.measure() if prefetched else nullcontext()):
            # Copied where it is used: its memory then goes back in the order in which the stream uses it.
            features = self._submodule.run_encoder(upcoming.side.to(self._device).inputs)
            ready = None if self._stream is None else self._stream.record_event()
        self._queue.append(QueuedMicrobatch(upcoming.side.keys, features, ready))
        return True

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for _, copied in self._copied:
                self._stream.wait_event(copied)
            self._copied.clear()
            yield

    def _handed_over(self, entry: QueuedMicrobatch) -> torch.Tensor | None:
        """The features for the compute stream."""
        if entry.features is None or entry.ready is None:
            return entry.features
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(entry.ready)
        # A copy, not `record_stream`: memory that autograd frees is free at once on the host's clock, and the host is
        # ahead of the device by as much as a step; the queue would take as much memory as that.
        features = entry.features.clone()
        self._copied.append((entry.features, compute.record_event()))
        return features
