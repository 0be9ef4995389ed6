"""What a run asks of a data set that is read once for all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from mimo.config.run import RunConfig
from mimo.grid.spec import Layout
from mimo.protocols import DataRequest, ImageDataProvider, ModelProvider, RoutedDataProvider


def data_request(layout: Layout, model_provider: ModelProvider, model_config: Any, *, micro_batch_size: int,
                 seq_length: int, seed: int, split: str) -> DataRequest:
    """What a run asks of a data set that is read once for all ranks."""
    module = layout.encoders[0].name if layout.encoders else ""
    return DataRequest(
        tokens=model_provider.token_spec(model_config),
        num_image_tokens=partial(model_provider.num_image_tokens, model_config, module),
        num_lanes=layout.num_lanes, micro_batch_size=micro_batch_size, seq_length=seq_length, seed=seed, split=split)


def describe_images(config: RunConfig, model_provider: ModelProvider) -> str | None:
    """A line that says how image files become pixels in a run; None where no such files are read."""
    dataset = config.find_dataset(config.data.dataset_provider)
    tokens = model_provider.token_spec(config.model_family)
    if not isinstance(dataset, ImageDataProvider) or not isinstance(dataset, RoutedDataProvider) or (
            tokens.image_token_id < 0):
        return None
    chosen = dataset.image_processing(config.dataset, tokens)
    details = [f"--image-tiling {chosen.tiling}", f"--image-resample {chosen.resample}"]
    if tokens.image_size:
        details.insert(1, f"(the encoder takes {tokens.image_shape[0]} x {tokens.image_shape[1]} pixels)")
    for name in ("max_tiles", "min_patches", "max_patches", "min_side"):
        if value := vars(chosen)[name]:
            details.append(f"--{name.replace('_', '-')} {value}")
    if chosen.use_thumbnail:
        details.append("--use-thumbnail")
    mean, std = (" ".join(map(str, values)) for values in (chosen.mean, chosen.std))
    return f"images: {' '.join(details)} --image-mean {mean} --image-std {std}"
