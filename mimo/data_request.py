"""What a run asks of a data set that is read once for all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from mimo.grid.spec import Layout
from mimo.protocols import DataRequest, ModelProvider


def data_request(layout: Layout, model_provider: ModelProvider, model_config: Any, *, micro_batch_size: int,
                 seq_length: int, seed: int, split: str) -> DataRequest:
    """What a run asks of a data set that is read once for all ranks."""
    module = layout.encoders[0].name if layout.encoders else ""
    return DataRequest(
        tokens=model_provider.token_spec(model_config),
        num_image_tokens=partial(model_provider.num_image_tokens, model_config, module),
        num_lanes=layout.num_lanes, micro_batch_size=micro_batch_size, seq_length=seq_length, seed=seed, split=split)
