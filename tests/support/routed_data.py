"""The mock data set read by lanes, one rank for each, as shards are, or with pixels that came from 8 bits.

Names are `tests.support.routed_data:NAME`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data.indexed import IndexedStream
from data.mock import MockProvider, build_sample
from mimo.protocols import DataRequest, Lane, Sample, TokenSpec
from mimo.visual import Normalisation

NORMALISATION = Normalisation((0.481, 0.457, 0.408), (0.268, 0.261, 0.275))


def from_eight_bits(sample: Sample, *, normalised: bool) -> Sample:
    """The sample with its images rounded to 256 levels, as they are or normalised."""
    if sample.images is None:
        return sample
    levels = [(image * 64 + 128).clip(0, 255).astype(np.uint8) for image in sample.images]
    if normalised:
        return replace(sample, images=[NORMALISATION.normalise(image) for image in levels])
    return replace(sample, images=levels, normalisation=NORMALISATION)


class LevelsMock(MockProvider):
    """The mock data set with pixels from 8 bits; `normalised`: as the floats that encoders take."""

    def __init__(self, normalised: bool) -> None:
        self.normalised = normalised

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        def build(index: int) -> Sample:
            return from_eight_bits(build_sample(config, tokens, lane, index), normalised=self.normalised)

        return IndexedStream(lane, build)


def pack(samples: Sequence[Sample]) -> Sample:
    """Several samples as one row."""
    return Sample(key=" ".join(sample.key for sample in samples),
                  tokens=np.concatenate([sample.tokens for sample in samples]),
                  target_mask=np.concatenate([sample.target_mask for sample in samples]),
                  image_sizes=[size for sample in samples for size in sample.image_sizes],
                  images=[image for sample in samples for image in sample.images or ()],
                  lengths=tuple(len(sample.tokens) for sample in samples), normalisation=samples[0].normalisation)


class MockReader:
    """Reads lanes of the mock data set; counts what it reads."""

    def __init__(self, provider: RoutedMock, config: Any, request: DataRequest, lanes: Sequence[int]) -> None:
        self.provider, self.started, self.read_keys = provider, False, []
        module = "text" if request.tokens.image_token_id < 0 else "vision"
        self.streams = {
            lane: provider.samples.stream(config, request.tokens,
                                          Lane(module, lane, request.num_lanes, request.seed, request.split))
            for lane in lanes
        }

    def start(self) -> None:
        self.started = True

    def read(self, lane: int) -> Sample:
        assert self.started, "read before start"
        samples = [next(self.streams[lane]) for _ in range(self.provider.per_row)]
        self.read_keys += [sample.key for sample in samples]
        if self.provider.fail_at is not None and len(self.read_keys) > self.provider.fail_at:
            raise ValueError(f"shard-7.tar {samples[0].key}: truncated")
        if self.provider.hang_at is not None and len(self.read_keys) > self.provider.hang_at:
            time.sleep(3600)
        return pack(samples) if self.provider.per_row > 1 else samples[0]

    def mark(self) -> Any:
        return {lane: stream.state_dict() for lane, stream in self.streams.items()}

    def state_dict(self, mark: Any) -> dict[int, dict[str, Any]]:
        return dict(mark)

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        lanes = {state["lanes"] for state in states.values()}
        for lane, stream in self.streams.items():
            if lane not in states or len(lanes) != 1:
                raise ValueError(f"--llm-dp: lane {lane} is not in {sorted(states)}")
            stream.load_state_dict(states[lane])

    def describe(self) -> str:
        return f"worker 3 reads shard-7.tar after {len(self.read_keys)} samples"

    def close(self) -> None:
        self.started = False


class RoutedMock:
    """The mock data set, read by lanes.

    Args:
        per_row: samples packed into a row; 1: rows are single samples.
        fail_at: a reader raises after so many samples.
        hang_at: a reader stops answering after so many samples.
        samples: the data set that is read.
    """

    Config = MockProvider.Config

    def __init__(self, per_row: int = 1, fail_at: int | None = None, hang_at: int | None = None,
                 samples: MockProvider | None = None) -> None:
        self.per_row, self.fail_at, self.hang_at = per_row, fail_at, hang_at
        self.samples = samples or MockProvider()
        self.readers: list[MockReader] = []

    def validate(self, config: Any, request: DataRequest) -> None:
        if self.per_row > 1 and request.micro_batch_size != 1:
            raise ValueError(f"--micro-batch-size {request.micro_batch_size}: packed rows stand alone")

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> MockReader:
        self.readers.append(MockReader(self, config, request, lanes))
        return self.readers[-1]

    def num_samples(self, config: Any, split: str) -> int | None:
        return None

    def decode(self, config: Any, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


single = RoutedMock()
packed = RoutedMock(per_row=2)
failing = RoutedMock(fail_at=9)
hanging = RoutedMock(hang_at=9)
levels, normalised = LevelsMock(normalised=False), LevelsMock(normalised=True)
routed_levels, routed_normalised = RoutedMock(samples=levels), RoutedMock(samples=normalised)
