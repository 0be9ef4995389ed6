"""Dynamic tiles have the sizes that vLLM serves Nemotron models with, by its own code, which takes long to import."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.image_tiling import Tiling, tile_sizes

pytestmark = pytest.mark.slow

LIMITS = [(4, 64), (4, 1024), (256, 1024), (1024, 13312), (100, 100), (5, 7)]


@settings(max_examples=3000, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(LIMITS), st.sampled_from([8, 14, 16]))
@example(3000, 4000, (1024, 13312), 16)
@example(1, 5000, (4, 64), 16)
def test_sizes_are_those_of_vllm(height, width, limits, patch):
    from vllm.transformers_utils.processors.nano_nemotron_vl import DynamicResolutionImageTiler

    tiler = DynamicResolutionImageTiler(
        max_model_len=1 << 30, patch_size=patch, min_num_patches=limits[0], max_num_patches=limits[1],
        downsample_ratio=0.5, norm_mean=[0.0] * 3, norm_std=[1.0] * 3)
    tiling = Tiling("dynamic", (0, 0), patch, 2 * patch, *limits, 0, 0, False, (0.5,) * 3, (0.5,) * 3, 3)
    try:
        (found,) = tiler.compute_params([Image.new("1", (width, height))], tiler.max_num_tokens_available(0))
        cols, rows = found.patch_size
    except ZeroDivisionError:
        cols, rows = 0, 0
    # Nothing of the shorter side is left: the engine fails, here or later.
    expected = [(rows * patch, cols * patch)] if rows and cols else None
    try:
        sizes = tile_sizes(height, width, tiling)
    except ValueError as error:
        assert "too narrow" in str(error)
        sizes = None
    assert sizes == expected
