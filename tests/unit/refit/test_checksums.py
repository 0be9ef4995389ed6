"""Checksums of boxes: the documented formula, whatever the dtype and strides, and sensitive to every byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.refit import messages
from mimo.refit.messages import ROW, checksums


def checksum(box: torch.Tensor) -> int:
    return int(checksums([box]))


def expected(box: torch.Tensor) -> int:
    """The formula, word by word."""
    data = box.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32) * np.int32(0x9E3779B1 - 2**32)
    words = (words ^ (words >> 15)).astype(object)
    total = sum((place + 1 + ROW) * int(word) for place, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (ROW,), (ROW - 1,), (2 * ROW + 5,), (7, 3, 11), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    box = (100 * torch.randn(shape, generator=generator)).to(dtype)
    if box.ndim == 0:
        box = box.reshape(1)
    assert checksum(box) == expected(box)


def test_a_view_has_the_checksum_of_its_elements() -> None:
    whole = torch.randn(9, 7)
    for view in (whole.T, whole[2:5, 1:4], whole[::2], whole.to(torch.bfloat16)[1:, 1:]):
        assert checksum(view) == checksum(view.contiguous().clone())
    assert checksums([whole, whole.T]).tolist() == [checksum(whole), checksum(whole.T)]
    assert checksum(whole) != checksum(whole.T)


@given(place=st.integers(0, 4 * 2 * ROW - 1), bit=st.integers(0, 7))
def test_every_bit_counts(place: int, bit: int) -> None:
    data = torch.arange(2 * ROW, dtype=torch.int32).mul_(2654435)
    before = checksum(data)
    data.view(torch.uint8)[place] ^= 1 << bit
    assert checksum(data) != before


@given(places=st.lists(st.integers(0, 3 * ROW), min_size=2, max_size=2, unique=True))
def test_values_that_change_places_count(places: list[int]) -> None:
    data = torch.arange(3 * ROW + 1, dtype=torch.int32)
    before = checksum(data)
    data[places] = data[places[::-1]]
    assert checksum(data) != before


def test_changes_by_the_last_bit_that_balance_each_other_count() -> None:
    data = torch.ones(ROW, dtype=torch.bfloat16)
    before = checksum(data)
    data.view(torch.int16)[[0, 2, 4, 6]] += torch.tensor([1, -1, -1, 1], dtype=torch.int16)
    assert checksum(data) != before


def test_boxes_of_one_size_are_summed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(50, 2 * ROW + 3).to(torch.bfloat16)
    boxes = [*whole, whole[0, 1:8], *whole.T[:5], whole[1, :7], whole.float()[3], whole.view(torch.uint8)[4, 1:15]]
    for limit in (1, 5 * whole[0].nbytes, 1 << 30):
        monkeypatch.setattr(messages, "TOGETHER_BYTES", limit)
        assert checksums(boxes).tolist() == [expected(box) for box in boxes]
