"""Data sets that break their promises in one sample, as a user's own could; `tests.support.bad_data:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from data.indexed import IndexedStream
from data.mock import MockProvider, build_sample
from mimo.protocols import LANGUAGE, Lane, Sample, TokenSpec

# The sample that is wrong, in the second global batch of 4. All samples have images.
BAD_INDEX = 6
# --image-token-id of the tests.
IMAGE_TOKEN_ID = 95


class BadProvider(MockProvider):
    """The mock data set, in which `spoil` changes the sample BAD_INDEX on the side of the bridge that it chooses."""

    def __init__(self, spoil: Callable[[Sample, bool], None]) -> None:
        self._spoil = spoil

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        return IndexedStream(lane, partial(self._build, replace(config, mock_text_only_fraction=0.0), tokens, lane))

    def _build(self, config: Any, tokens: TokenSpec, lane: Lane, index: int) -> Sample:
        sample = build_sample(config, tokens, lane, index)
        if index == BAD_INDEX:
            self._spoil(sample, lane.module != LANGUAGE)
        return sample


def _drop_image(sample: Sample, encoder_side: bool) -> None:
    if encoder_side:
        assert sample.images
        sample.images.pop()


def _drop_size(sample: Sample, encoder_side: bool) -> None:
    sample.image_sizes.pop()
    if sample.images:
        sample.images.pop()


def _crop_image(sample: Sample, encoder_side: bool) -> None:
    if encoder_side:
        assert sample.images
        sample.images[-1] = sample.images[-1][:, 1:]


def _encode_fewer_images(sample: Sample, encoder_side: bool) -> None:
    """A sample that is complete on either side, and not the same."""
    if encoder_side:
        _drop_size(sample, encoder_side)
        placeholder = np.flatnonzero(sample.tokens == IMAGE_TOKEN_ID)[-1]
        sample.tokens = np.delete(sample.tokens, placeholder)
        sample.target_mask = np.delete(sample.target_mask, placeholder)


def _encode_another_sample(sample: Sample, encoder_side: bool) -> None:
    if encoder_side:
        sample.key += "-other"


def _overflow(sample: Sample, encoder_side: bool) -> None:
    """Pixels that are finite, and too large for a forward pass."""
    if encoder_side:
        assert sample.images
        sample.images[0] = np.full_like(sample.images[0], 3e38)


missing_image = BadProvider(_drop_image)
missing_size = BadProvider(_drop_size)
cropped_image = BadProvider(_crop_image)
fewer_images_encoded = BadProvider(_encode_fewer_images)
another_sample_encoded = BadProvider(_encode_another_sample)
overflow = BadProvider(_overflow)


class UnopenedProvider(MockProvider):
    """A data set that finds its file missing when a lane is opened."""

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        raise FileNotFoundError(2, "No such file or directory", "nowhere/list.txt")


unopened = UnopenedProvider()
