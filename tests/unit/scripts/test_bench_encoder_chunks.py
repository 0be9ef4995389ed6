"""The benchmark of encoder chunks: how images are split into passes, and its figures."""

from __future__ import annotations

import pytest

from scripts.bench.encoder_chunks import BY_MICROBATCH, parts_of, row


def test_every_image_is_in_one_pass() -> None:
    counts = [3, 0, 1, 4]
    assert parts_of(counts, BY_MICROBATCH) == [slice(0, 3), slice(3, 4), slice(4, 8)]
    assert parts_of(counts, 3) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert parts_of(counts, 100) == [slice(0, 8)]


def test_ratios_are_those_of_the_same_round() -> None:
    times = {BY_MICROBATCH: [0.010, 0.020, 0.030], 4: [0.009, 0.019, 0.015], 16: None}
    four, sixteen = row(4, 2, times), row(16, 1, times)
    assert four["ms"] == 15 and four["ratio"] == pytest.approx(0.9)
    assert (four["ratio_min"], four["ratio_max"]) == (pytest.approx(0.5), pytest.approx(0.95))
    assert sixteen["error"] == "out of memory" and sixteen["ms"] is sixteen["ratio"] is None
