"""The mock data set with images where a test wants them, by global sample index; `tests.support.shaped_data:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from data.indexed import IndexedStream
from data.mock import MockProvider, build_sample
from mimo.protocols import Lane, Sample, TokenSpec

# Samples of a global batch of the tests' small model.
BATCH = 12


class ShapedProvider(MockProvider):
    """The mock data set, in which exactly the samples for which `has_images(step, place)` holds have images.

    `step` counts global batches, `place` is the sample's index in its batch.
    """

    def __init__(self, has_images: Callable[[int, int], bool]) -> None:
        self._has_images = has_images

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        return IndexedStream(lane, partial(self._build, config, tokens, lane))

    def _build(self, config: Any, tokens: TokenSpec, lane: Lane, index: int) -> Sample:
        text_only = not self._has_images(*divmod(index, BATCH))
        return build_sample(replace(config, mock_text_only_fraction=float(text_only)), tokens, lane, index)


# Step 0: images in even samples only, those of lane 0 of two. Step 1: in all. Step 2: in none.
some_lanes = ShapedProvider(lambda step, place: step == 1 or step == 0 and place % 2 == 0)

# The last two samples of a batch are its last microbatch, one for each of two encoder ranks. Step 0: the second rank's
# is text only. Step 1: the first rank has no image in the whole batch. Step 2: the whole microbatch is text only.
text_only_last = ShapedProvider(lambda step, place: [place != 11, place % 2 == 1, place < 10][step])
