"""A model with two encoders on grids of their own, and data that mixes images for both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mimo.protocols import LANGUAGE, Lane, Sample, SampleStream, TokenSpec
from mimo.registry import dataset_provider, model_provider

THERMAL_ID = 94
mock_model, mock_data = model_provider("mock"), dataset_provider("mock")


class TwoEncoders(type(mock_model)):
    """The mock model with a second encoder, `thermal`, of the same sizes and its own parameters and placeholder."""

    def encoders(self, config: Any) -> tuple[str, ...]:
        return ("vision", "thermal")

    def special_token_ids(self, config: Any) -> dict[str, int]:
        return {"vision": config.image_token_id, "thermal": THERMAL_ID}

    def parameter_shapes(self, config: Any, module: str) -> Any:
        return super().parameter_shapes(config, "vision" if module == "thermal" else module)

    def encoder_spec(self, config: Any, module: str, context: Any) -> Any:
        return super().encoder_spec(config, "vision", context)


class MixedStream:
    """The mock stream with every second image handed to the thermal encoder."""

    def __init__(self, stream: SampleStream, image_token_id: int) -> None:
        self.stream, self.image_token_id = stream, image_token_id

    def __iter__(self) -> MixedStream:
        return self

    def __next__(self) -> Sample:
        sample = next(self.stream)
        tokens = sample.tokens.copy()
        images = np.flatnonzero(tokens == self.image_token_id)
        tokens[tokens == THERMAL_ID] = 1
        tokens[images[1::2]] = THERMAL_ID
        return replace(sample, tokens=tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class MixedData(type(mock_data)):
    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> MixedStream:
        assert lane.module in ("vision", "thermal", LANGUAGE)
        return MixedStream(super().stream(config, tokens, lane), tokens.image_token_id)


model = TwoEncoders()
data = MixedData()
