"""A data set whose language lane stops for ever after the first global batch."""

from __future__ import annotations

import time
from typing import Any

from mimo.protocols import LANGUAGE, Lane, Sample, TokenSpec
from mimo.registry import dataset_provider

mock_data = dataset_provider("mock")


class StallingStream:
    def __init__(self, stream: Any, samples: int) -> None:
        self.stream, self.left = stream, samples

    def __iter__(self) -> StallingStream:
        return self

    def __next__(self) -> Sample:
        if not self.left:
            time.sleep(10_000)
        self.left -= 1
        return next(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StallingData(type(mock_data)):
    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> Any:
        stream = super().stream(config, tokens, lane)
        return StallingStream(stream, 8) if lane.module == LANGUAGE else stream


provider = StallingData()
