"""The data of one rank: the lanes and sides it needs, one iteration at a time, prepared in the background."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch

from mimo.batch import EncoderBatch, Microbatch, TextBatch
from mimo.grid.spec import LaneShare, Layout, lane_shares
from mimo.protocols import LANGUAGE, DataProvider, Lane, ModelProvider, Sample, SampleStream
from mimo.training.collate import collate_encoder, collate_text


@dataclass
class Reader:
    """One open lane: `share` of each of its microbatches is read, the rest is skipped."""

    share: LaneShare
    stream: SampleStream


class StepLoader:
    """Microbatches of one rank, iteration by iteration.

    Language ranks read the text of their lane, on every pipeline stage (only the first uses `input_ids` and only the
    last `labels`; text is small, and one rule for all stages keeps keys and counts at hand everywhere). Encoder ranks
    read their share of the lanes they serve, pixels on the first pipeline stage only. A colocated rank does both.

    Args:
        layout: all grids; must be valid.
        rank: this process.
        model_provider, model_config: the model family and its flags.
        data_provider, data_config: the data set and its flags.
        micro_batch_size: samples of a lane in a microbatch.
        num_microbatches: microbatches of an iteration.
        seq_length: tokens per sample after image expansion and padding.
        seed: seed of the sample order.
        split: `train` or `valid`.
        pad_token_id: fills the end of short samples.
        dtype: dtype of pixel values.
        pin_memory: give tensors in page-locked memory, from which copies to a GPU do not block the host.
        prefetch: prepare the next iteration in a background thread while the current one is used.

    Attributes:
        consumed_samples: samples of all lanes that `next_step` has handed out.
        last_wait_s: seconds the last `next_step` waited for data.

    Raises:
        ValueError: the data set refuses the configuration.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        model_provider: ModelProvider,
        model_config: Any,
        data_provider: DataProvider,
        data_config: Any,
        micro_batch_size: int,
        num_microbatches: int,
        seq_length: int,
        seed: int,
        split: str = "train",
        pad_token_id: int = 0,
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        pin_memory: bool = False,
    ) -> None:
        self._layout = layout
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._tokens = model_provider.token_spec(model_config)
        ids = model_provider.special_token_ids(model_config)
        modules = {grid.name: ids[grid.name] for grid in layout.encoders}
        num_image_tokens = partial(model_provider.num_image_tokens, model_config)
        self._collate_text = partial(
            collate_text,
            modules=modules,
            num_image_tokens=num_image_tokens,
            seq_length=seq_length,
            vocab_size=self._tokens.vocab_size,
            pad_token_id=pad_token_id,
        )
        self._collate_encoder = partial(
            collate_encoder,
            modules=modules,
            num_image_tokens=num_image_tokens,
            num_channels=self._tokens.num_channels,
            dtype=dtype,
        )
        self._readers: dict[str, list[Reader]] = {}
        self._with_pixels: dict[str, bool] = {}
        for module in layout.modules_of(rank):
            position = layout.grids[module].coordinates(rank)
            self._with_pixels[module] = module != LANGUAGE and position["pp"] == 0
            # A lane opened as the language side never builds images.
            side = module if self._with_pixels[module] else LANGUAGE
            self._readers[module] = []
            for share in self._shares(module, position["dp"]):
                lane = Lane(side, share.lane, self._lanes, seed, split)
                self._readers[module].append(Reader(share, data_provider.stream(data_config, self._tokens, lane)))
        self._pin_memory = pin_memory
        self.consumed_samples = 0
        self.last_wait_s = 0.0
        self._state = self._stream_states()
        self._broken = self._closed = False
        self._pool = ThreadPool(1) if prefetch else None
        self._pending: AsyncResult[tuple[list[Microbatch], dict[str, Any]]] | None = None

    @property
    def _lanes(self) -> int:
        return self._layout.num_lanes

    @property
    def samples_per_step(self) -> int:
        """Samples of all lanes in one iteration: the global batch size."""
        return self._micro_batch_size * self._num_microbatches * self._lanes

    def _shares(self, module: str, dp_rank: int) -> tuple[LaneShare, ...]:
        """What data-parallel rank `dp_rank` of a module reads of each microbatch."""
        if module == LANGUAGE:
            return (LaneShare(dp_rank, 0, self._micro_batch_size),)
        encoder_dp = self._layout.grids[module].dp
        assert max(encoder_dp, self._lanes) % min(encoder_dp, self._lanes) == 0, (encoder_dp, self._lanes)
        return lane_shares(encoder_dp, self._lanes, self._micro_batch_size, dp_rank)

    def _read(self, reader: Reader) -> list[Sample]:
        """This rank's samples of the reader's next microbatch."""
        reader.stream.skip(reader.share.start)
        samples = list(islice(reader.stream, reader.share.stop - reader.share.start))
        if len(samples) != reader.share.stop - reader.share.start:
            raise ValueError(f"lane {reader.share.lane}: the data set ended inside a microbatch; it must start over")
        reader.stream.skip(self._micro_batch_size - reader.share.stop)
        return samples

    def _read_text(self) -> TextBatch:
        (reader,) = self._readers[LANGUAGE]
        return self._collate_text(self._read(reader))

    def _read_encoder(self, module: str) -> EncoderBatch:
        by_lane = [self._read(reader) for reader in self._readers[module]]
        return self._collate_encoder(
            [sample for samples in by_lane for sample in samples],
            module=module,
            lane_sizes=[len(samples) for samples in by_lane],
            pixels=self._with_pixels[module],
        )

    def _produce(self) -> tuple[list[Microbatch], dict[str, Any]]:
        """The next iteration, and where the streams stand after it."""
        microbatches = [
            Microbatch(
                text=self._read_text() if LANGUAGE in self._readers else None,
                encoders={module: self._read_encoder(module) for module in self._readers if module != LANGUAGE},
            )
            for _ in range(self._num_microbatches)
        ]
        if self._pin_memory:
            microbatches = [batch.pin_memory() for batch in microbatches]
        return microbatches, self._stream_states()

    def next_step(self) -> list[Microbatch]:
        """The microbatches of one iteration, as host tensors.

        Raises:
            ValueError: a sample is wrong; the message names it. Any other error of the data set comes through with its
                own type. After an error the loader stands between samples and only `load_state_dict` revives it.
            RuntimeError: the loader is closed, or failed before.
        """
        if self._closed or self._broken:
            raise RuntimeError("the loader is closed" if self._closed else "the loader failed in an earlier step")
        started = time.perf_counter()
        self._broken = True  # stays so if the next lines raise
        if self._pool is None:
            microbatches, state = self._produce()
        else:
            pending = self._pending or self._pool.apply_async(self._produce)
            self._pending = None
            microbatches, state = pending.get()
            self._pending = self._pool.apply_async(self._produce)
        self._broken = False
        self.last_wait_s = time.perf_counter() - started
        self._state = state
        self.consumed_samples += self.samples_per_step
        return microbatches

    def _stream_states(self) -> dict[str, Any]:
        return {
            f"{module}/{reader.share.lane}": reader.stream.state_dict()
            for module, readers in self._readers.items()
            for reader in readers
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last step handed out; what was only prefetched does not count.

        Returns:
            `consumed_samples`, and `streams`: the state of each open stream by `module/lane`.
        """
        return {"consumed_samples": self.consumed_samples, "streams": dict(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which `state` was taken, by this rank or, merged, by several.

        A stream whose own state is not in `streams` (the layout changed) takes the state of another: all streams of a
        run stand at the same global sample, and a data set that cannot change its lanes refuses it.

        Raises:
            ValueError: a data set's stream cannot continue from the state.
        """
        if self._pending is not None:
            self._pending.wait()  # the streams belong to the thread until it is done; what it read is dropped
            self._pending = None
        streams = state["streams"]
        for module, readers in self._readers.items():
            for reader in readers:
                name = f"{module}/{reader.share.lane}"
                reader.stream.load_state_dict(streams[name] if name in streams else next(iter(streams.values())))
        self.consumed_samples = int(state["consumed_samples"])
        self._state = self._stream_states()
        self._broken = False

    def close(self) -> None:
        """Stop the background thread. `next_step` raises from then on; calling it again does nothing."""
        self._closed = True
        self._pending = None
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
