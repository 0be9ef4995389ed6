"""Rows that data sets with readers give: images for them, the next rows of some lanes, and whether two are the same."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.energon.provider import Config as EnergonConfig
from mimo.protocols import DataRequest, RoutedDataProvider, Sample


def png(grey: int = 0, width: int = 16, height: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height), grey).save(buffer, "PNG")
    return buffer.getvalue()


def read_rows(source: RoutedDataProvider, config: Any, asks: DataRequest, count: int, lanes: Sequence[int] = (0,),
              states: Mapping[str, Any] | None = None) -> list[Sample]:
    """Return the next rows of some lanes in turn, after a saved state if there is one."""
    source.validate(config, asks)
    reader = source.reader(config, asks, list(lanes))
    if states is not None:
        reader.load_state_dict(states)
    reader.start()
    try:
        return [reader.read(lane) for _ in range(count) for lane in lanes]
    finally:
        reader.close()


def for_shards(config: Any, folder: Path) -> EnergonConfig:
    """Return the flags that read shards in stored order as `config` reads files."""
    values = {field.name: getattr(config, field.name) for field in fields(EnergonConfig)}
    return replace(EnergonConfig(**values), data_path=str(folder), shuffle=False)


def are_same(one: Sample, other: Sample) -> bool:
    """Return whether two rows are equal but for their names."""
    assert one.images is not None and other.images is not None
    return (np.array_equal(one.tokens, other.tokens) and np.array_equal(one.target_mask, other.target_mask)
            and list(one.image_sizes) == list(other.image_sizes) and len(one.images) == len(other.images)
            and all(map(np.array_equal, one.images, other.images)) and one.lengths == other.lengths)
