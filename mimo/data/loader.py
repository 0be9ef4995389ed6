"""The data of one rank, prepared in the background, one iteration at a time."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from itertools import islice
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch
import torch.distributed as dist

from mimo.comm import HostChannel
from mimo.config.trainer import DataConfig
from mimo.data.batch import Microbatch, with_part
from mimo.data.collate import Placeholders, collate_encoder, collate_text
from mimo.data.sources import ReaderSource, RoutedSource, Source, StreamSource, ordered
from mimo.grid.lanes import LaneOrder, Need, data_request, lane_order, lanes_read_by, needs_of, sequence_multiple
from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE, DataProvider, ModelProvider, RoutedDataProvider
from mimo.watchdog.status import LoaderStatus


class StepLoader:
    """Microbatches of one rank, iteration by iteration.

    Args:
        layout: all grids; must be valid.
        rank: this process.
        source: this rank's samples.
        model_provider, model_config: the model family and its flags.
        micro_batch_size: samples of a lane in a microbatch.
        num_microbatches: microbatches of an iteration.
        seq_length: most tokens of a sample after image expansion and padding.
        row_multiple: see `collate_text`.
        dtype: dtype of pixel values.
        prefetch: prepare the next iteration in a background thread while the current one is used.
        pin_memory: return tensors in page-locked memory, from which copies to a GPU do not block the host.

    Attributes:
        consumed_samples: samples of all lanes that `next_step` has handed out.
        last_wait_s: seconds that the last `next_step`, and `peek` since then, waited for data.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        source: Source,
        *,
        model_provider: ModelProvider,
        model_config: Any,
        micro_batch_size: int,
        num_microbatches: int,
        seq_length: int,
        row_multiple: int | None = None,
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        pin_memory: bool = False,
    ) -> None:
        self._source = source
        self._needs = needs_of(layout, rank, micro_batch_size)
        self._num_microbatches = num_microbatches
        self.samples_per_step = micro_batch_size * num_microbatches * layout.num_lanes
        images = Placeholders.of(model_provider, model_config, layout)
        self._collate_text = partial(
            collate_text,
            images=images,
            seq_length=seq_length,
            vocab_size=model_provider.token_spec(model_config).vocab_size,
            pad_token_id=0,
            sequence_multiple=sequence_multiple(layout),
            row_multiple=row_multiple,
        )
        self._collate_encoder = partial(collate_encoder, images=images, dtype=dtype)
        language = layout.language
        self._cp_rank = language.coordinates(rank)["cp"] if rank in language.ranks else 0
        self._cp = language.cp
        self._pin_memory = pin_memory
        self.consumed_samples = 0
        self.last_wait_s = 0.0
        self._streams = self._streams_now()
        self._started = self._broken = self._closed = self._closing = False
        self._pool = ThreadPool(1) if prefetch else None
        self._pending: AsyncResult[tuple[list[Microbatch], dict[str, Any]]] | None = None
        # Iterations that are ready and not returned yet.
        self._ready: deque[tuple[list[Microbatch], dict[str, Any]]] = deque()

    def _streams_now(self) -> dict[str, Any]:
        return self._source.state_dict(self._source.mark())

    def _produce(self) -> tuple[list[Microbatch], dict[str, Any]]:
        """Return the next iteration, and the state of the streams after it.

        The state is taken with every iteration. A save that asked the source later would wait until the iteration that
        is then being read is complete.
        """
        samples = self._source.read()
        text_lane = next((need.share.lane for need in self._needs if need.module == LANGUAGE), None)
        encoder_needs: dict[str, list[Need]] = {}
        for need in self._needs:
            if need.module != LANGUAGE:
                encoder_needs.setdefault(need.module, []).append(need)
        microbatches = []
        for index in range(self._num_microbatches):
            text = None
            if text_lane is not None:
                text = with_part(self._collate_text(samples[LANGUAGE, text_lane][index]), self._cp, self._cp_rank)
            encoders = {}
            for module, needs in encoder_needs.items():
                # An encoder rank may serve several lanes, whose samples become one batch in the order of the lanes.
                by_lane = [samples[module, need.share.lane][index] for need in needs]
                encoders[module] = self._collate_encoder(
                    [sample for lane in by_lane for sample in lane], module=module,
                    lane_sizes=[len(lane) for lane in by_lane], pixels=needs[0].pixels)
            microbatches.append(Microbatch(text, encoders))
        if self._pin_memory:
            microbatches = [batch.pin_memory() for batch in microbatches]
        return microbatches, self._streams_now()

    def next_step(self) -> list[Microbatch]:
        """Return the microbatches of one iteration, as host tensors.

        Raises:
            ValueError: a sample is wrong; the message names it. Any other error of the data set is raised unchanged.
                After an error, part of an iteration has been read, and only `load_state_dict` makes the loader usable
                again.
            RuntimeError: the loader is closed, or failed before.
        """
        self.last_wait_s = 0.0
        self._have_ready(1)
        microbatches, self._streams = self._ready.popleft()
        self.consumed_samples += self.samples_per_step
        return microbatches

    def peek(self, num_steps: int) -> list[list[Microbatch]]:
        """Return the iterations that the next calls of `next_step` will return, without consuming them.

        This waits for all of them. Where lanes are routed, all ranks have to ask for the same number.

        Raises:
            ValueError, RuntimeError: as `next_step`.
        """
        self._have_ready(num_steps)
        return [microbatches for microbatches, _ in islice(self._ready, num_steps)]

    def _have_ready(self, num_steps: int) -> None:
        """Wait until this many iterations are ready, and let the background thread, if any, begin one more."""
        if self._closed or self._broken:
            raise RuntimeError("the loader is closed" if self._closed else "the loader failed in an earlier step")
        started = time.perf_counter()
        self._broken = True  # stays so if the next lines raise
        if not self._started:
            self._source.start()
            self._started = True
        while len(self._ready) < num_steps:
            if self._pool is None:
                self._ready.append(self._produce())
            else:
                pending = self._pending or self._pool.apply_async(self._produce)
                self._pending = None
                self._ready.append(pending.get())
        if self._pool is not None and self._pending is None:
            self._pending = self._pool.apply_async(self._produce)
        self._broken = False
        self.last_wait_s += time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last iteration that `next_step` returned. Waits for nothing.

        Iterations that were only prefetched or peeked at do not count.

        Returns:
            `consumed_samples`, and `streams`: the state of each stream that this rank reads, by `module/lane`.
        """
        return {"consumed_samples": self.consumed_samples, "streams": dict(self._streams)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which `state` was taken, by this rank or, merged, by several.

        Raises:
            ValueError: the data set cannot continue from the state.
        """
        if self._pending is not None:
            # The source belongs to the thread until it is done. What it has read is dropped.
            self._pending.wait()
            self._pending = None
        self._ready.clear()
        if state["streams"]:
            self._source.load_state_dict(state["streams"])
        self.consumed_samples = int(state["consumed_samples"])
        self._streams = self._streams_now()
        self._broken = False

    def describe(self) -> str:
        """Describe what `next_step` waits for."""
        return self._source.describe()

    def status(self) -> LoaderStatus:
        """Describe what the loader does now. The watchdog's thread calls this."""
        pending = self._pending
        # While `next_step` waits, `_pending` is None.
        busy = self._closing or self._broken or (pending is not None and not pending.ready())
        return LoaderStatus(busy, self.describe(), self._source.waits_for)

    def close(self, *, failed: bool = False) -> None:
        """Stop the background thread. `next_step` raises from then on. A second call does nothing.

        Args:
            failed: whether the run ends because of an error, here or elsewhere. Then this waits for no other rank.
        """
        if self._closed:
            return
        self._closed = True
        if not failed and not self._broken:
            self._closing = True
            if self._pending is not None:
                # Other ranks take part in the iteration that is being read. All of them have asked for it, so the wait
                # is short.
                self._pending.wait()
            self._source.close()
            self._closing = False
        self._pending = None
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None


def open_loader(layout: Layout, rank: int, *, model_provider: ModelProvider, model_config: Any,
                data_provider: DataProvider | RoutedDataProvider, data_config: Any, micro_batch_size: int,
                num_microbatches: int, seq_length: int, row_multiple: int | None = None, seed: int,
                split: str = "train", lane_loader: str = DataConfig.lane_loader,
                microbatch_order: str = DataConfig.microbatch_order, host: dist.ProcessGroup | None = None,
                tag: int = 0, **loader: Any) -> StepLoader:
    """Open the data of one rank as microbatches. Collective over the world where lanes are routed.

    `lane_loader` is `routed` or `per-lane`, for a data set that is costly to read; routed lanes need `host`, the gloo
    group of the world, and a `tag` that no other open loader has. The split `train` has its microbatches in
    `microbatch_order` (`mimo.grid.lanes.lane_order`). The other arguments are those of `data_request` and
    `StepLoader`.

    Raises:
        ValueError: the data set refuses the configuration.
    """
    request = data_request(layout, model_provider, model_config, micro_batch_size=micro_batch_size,
                           seq_length=seq_length, seed=seed, split=split)
    # An evaluation tells from a sample's place whether the split has ended before it.
    order = LaneOrder.READ if split != "train" else lane_order(
        microbatch_order, layout, data_provider, rows_differ=(row_multiple or seq_length) < seq_length)
    rows: dict[str, Any] = {"micro_batch_size": micro_batch_size, "num_microbatches": num_microbatches,
                            "order": list if order is LaneOrder.READ else partial(ordered, order, request)}
    needs = needs_of(layout, rank, micro_batch_size)
    source: Source
    if not isinstance(data_provider, RoutedDataProvider):
        source = StreamSource(data_provider, data_config, request.tokens, needs, lanes=request.num_lanes, seed=seed,
                              split=split, sequence_multiple=request.sequence_multiple, **rows)
    elif lane_loader == "per-lane" or layout.world_size == 1:
        lanes = tuple(sorted({need.share.lane for need in needs}))
        source = ReaderSource(data_provider.reader(data_config, request, lanes), lanes, needs, **rows)
    else:
        assert host is not None, "routed lanes need the host group"
        own = lanes_read_by(layout, rank)
        local = ReaderSource(data_provider.reader(data_config, request, own), own, (), **rows) if own else None
        source = RoutedSource(local, layout, rank, micro_batch_size, HostChannel(host, tag))
    return StepLoader(layout, rank, source, model_provider=model_provider, model_config=model_config,
                      micro_batch_size=micro_batch_size, num_microbatches=num_microbatches, seq_length=seq_length,
                      row_multiple=row_multiple, **loader)
