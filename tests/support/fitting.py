"""Layouts of grids for checks of model families, and what the checks find wrong."""

from __future__ import annotations

from typing import Any

import pytest

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ModelProvider
from providers.common.family import VISION


def layout(vision: dict[str, int] | None = None, **language: int) -> Layout:
    """Return an encoder's grid, and behind it that of the language model."""
    encoder = GridSpec(VISION, **(vision or {}))
    grid = GridSpec(LANGUAGE, offset=encoder.size, **language)
    return Layout("disjoint", encoder.size + grid.size, (encoder,), grid)


def text_layout(**language: int) -> Layout:
    grid = GridSpec(LANGUAGE, **language)
    return Layout("disjoint", grid.size, (), grid)


def problems_of(provider: ModelProvider, config: Any, grids: Layout, seq_length: int = 64) -> list[str]:
    """Return the problems, of which there is at least one, line by line."""
    with pytest.raises(ValueError) as caught:
        provider.validate(config, grids, seq_length)
    return str(caught.value).splitlines()
