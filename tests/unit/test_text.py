"""Sizes as text and back."""

import pytest

from mimo.text import format_bytes, parse_bytes


@pytest.mark.parametrize(("text", "expected"), [
    ("5GB", 5_000_000_000), ("512MiB", 512 * 2**20), ("1000", 1000), ("1.5 kb", 1500), ("2TiB", 2**41), ("7B", 7),
])
def test_sizes_are_read(text, expected):
    assert parse_bytes(text, "--max-shard-size") == expected


@pytest.mark.parametrize("text", ["", "5 apples", "-1GB", "0", "0.1B", "GB", "5GBit", "1e9"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(ValueError, match="--max-shard-size"):
        parse_bytes(text, "--max-shard-size")


def test_a_size_is_shown_in_both_units():
    assert [format_bytes(count) for count in (1023, 1024, 4_718_592)] == ["1023 B", "1,024 B (1.0 KiB)",
                                                                          "4,718,592 B (4.5 MiB)"]
