"""Features of coming microbatches, computed by a frozen encoder while its rank waits for others.

A frozen encoder gives the same features in any step. So a rank that waits for a gradient, or for the end of the step,
can run the encoder on microbatches that come later, those of coming iterations included; what follows it (the
projector) runs in the microbatch's own forward pass.

The points of the program where this happens are fixed: every transfer of the bridge, once its messages are under way,
and the sum over all ranks at the end of a step. Therefore the ranks of a replica run the same microbatches, with their
tensor-parallel collectives, in the same order. (The published `encoder_prefetch` of Megatron-LM's examples/mimo runs in
a thread and does not support tensor parallelism.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mimo.data.batch import EncoderBatch, Microbatch
from mimo.observability.clock import DeviceTimer
from mimo.observability.spans import Kind, Trace

if TYPE_CHECKING:
    from mimo.model.submodule import VisionSubmodule


@dataclass(frozen=True)
class QueuedMicrobatch:
    """Features in the queue.

    Attributes:
        keys: sample keys of the microbatch.
        features: result of `VisionSubmodule.run_encoder`; None without images.
        ready: event after their computation, if the encoder has a stream of its own.
    """

    keys: tuple[str, ...]
    features: torch.Tensor | None
    ready: torch.cuda.Event | None


class EncoderPrefetch:
    """The feature queue of one rank's encoder. During a step, all microbatches take their features from here.

    On a GPU the encoder may have a stream of its own. The limit of `depth` microbatches then holds on the device as
    well: however far the host is ahead, the encoder starts on a microbatch only after the compute stream has copied the
    features from `depth` microbatches before.

    Args:
        module: the encoder's name.
        submodule: the encoder, frozen, and its projector, on the only pipeline stage.
        depth: most microbatches with images in the queue, at least 1.
        device: device of the encoder.
        own_stream: run the encoder on a stream of its own. This is wrong for kernels that share memory across streams,
            such as Transformer Engine's matrix products with their one workspace for each device.
        trace: records what the rank does.

    Attributes:
        active: whether a training step is under way.
    """

    def __init__(self, module: str, submodule: VisionSubmodule, *, depth: int, device: torch.device, own_stream: bool,
                 trace: Trace) -> None:
        assert depth >= 1 and submodule.is_first_stage and submodule.is_last_stage, (module, depth)
        self._module, self._submodule, self._depth, self._device = module, submodule, depth, device
        self._trace = trace
        self._stream = torch.cuda.Stream(device) if own_stream else None
        self._queue: deque[QueuedMicrobatch] = deque()
        # Inputs whose features are still to be computed, each with the index of its microbatch and whether that belongs
        # to a later iteration.
        self._upcoming: deque[tuple[EncoderBatch, int, bool]] = deque()
        # Features that the compute stream still copies, with the event after the copy. Their memory belongs to the
        # encoder's stream, which must not reuse it before.
        self._copied: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._timer = DeviceTimer()
        self.active = False

    def begin_step(self, microbatches: Sequence[Microbatch],
                   coming: Sequence[Sequence[Microbatch]] = ()) -> list[Microbatch]:
        """Begin a step.

        Args:
            microbatches: the step's microbatches, on the host.
            coming: microbatches of later iterations that are known already; the same on all ranks of a replica. Later
                steps must consist of these.

        Returns:
            The step's microbatches without the encoder's input, so that it does not go to the device twice.
        """
        if self._stream is not None:
            # Weights may have been written since the last step. During a step nothing writes them.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        upcoming = [(batch.encoders[self._module], index, number > 0)
                    for number, step in enumerate((microbatches, *coming)) for index, batch in enumerate(step)]
        for entry, (side, *_) in zip(self._queue, upcoming, strict=False):
            assert entry.keys == side.keys, f"features of {entry.keys}, but {side.keys} come next"
        self._upcoming = deque(upcoming[len(self._queue):])
        self.active = True
        # Sizes are on the host. A projector that joins the tokens of tiles reads them.
        return [replace(batch, encoders=batch.encoders | {self._module: replace(side, inputs={
                    name: value for name, value in side.inputs.items() if isinstance(value, np.ndarray)})})
                for batch in microbatches for side in (batch.encoders[self._module],)]

    def end_step(self) -> None:
        """End a step. Features in the queue stay there for the next steps."""
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
        """Return device seconds of `launch` and `fill` since the last call. Unfinished work counts in a later call."""
        return self._timer.drain_s(wait=False)

    @property
    def num_held(self) -> int:
        """Number of microbatches with features in the queue. Microbatches without images have none."""
        return sum(entry.features is not None for entry in self._queue)

    @property
    def _has_more(self) -> bool:
        return self.active and bool(self._upcoming) and self.num_held < self._depth

    def take(self, side: EncoderBatch) -> torch.Tensor | None:
        """Take the features of the step's next microbatch. If they were not prefetched, compute them now.

        Returns:
            `[images, tokens, features]`, packed `[1, tokens, features]`; None without images.
        """
        # On a GPU this is how long the compute stream waits for the encoder's.
        with self._trace.spans.span(Kind.FORWARD, "encoder"):
            if not self._queue:
                self._run_next(prefetched=False)
            entry = self._queue.popleft()
            assert entry.keys == side.keys, f"features of {entry.keys} for {side.keys}"
            if entry.features is None or entry.ready is None:
                return entry.features
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(entry.ready)
            # A copy instead of `record_stream`: the host may be a whole step ahead of the device, and with
            # `record_stream` the memory of all features of that step would be in use at once.
            features = entry.features.clone()
            self._copied.append((entry.features, compute.record_event()))
            return features

    def _run_next(self, *, prefetched: bool) -> bool:
        """Compute the next features and queue them; returns whether the encoder ran."""
        side, index, is_ahead = self._upcoming.popleft()
        if not side.inputs:
            self._queue.append(QueuedMicrobatch(side.keys, None, None))
            return False
        what = "encoder prefetch" if prefetched else "encoder"
        if is_ahead:
            what += " of a coming iteration"
        with (self._trace.wait(what, Kind.FORWARD, module=self._module, microbatch=index, is_work=True),
              self._on_own_stream(), self._timer.measure() if prefetched else nullcontext()):
            # The input is copied on the stream that uses it, so that its memory is reused in the order of that stream.
            features = self._submodule.run_encoder(side.to(self._device).normalised_inputs())
            ready = None if self._stream is None else self._stream.record_event()
        self._queue.append(QueuedMicrobatch(side.keys, features, ready))
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
