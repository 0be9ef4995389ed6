"""Messages: boxes of any dtype in and out again, from and to views of any strides, and their checksums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.boxes import Box
from mimo.refit import messages
from mimo.refit.messages import ALIGNMENT, ROW, Views, check_inside, checksums, copy_all, message_layout, pack
from mimo.refit.plan import Op
from mimo.refit.tensor_slices import Address

CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float32")


def operation_of(entry: int, box: Box) -> Op:
    return Op(entry, "any", box, Address("any", 0, (1,) * len(box.starts)), 0, 0)


# Bug 2: a float32 tensor among others, and sizes that fill no word.
OPERATIONS = (operation_of(0, Box((2, 0), (5, 3))), operation_of(1, Box((0,), (5,))),
              operation_of(2, Box((1, 1), (2, 4))), operation_of(3, Box((0, 0, 0), (1, 1, 1))),
              operation_of(0, Box((0, 0), (1, 1))))


def values_of(operation: Op) -> torch.Tensor:
    count = operation.box.numel
    return (torch.arange(count) + operation.entry + 1).view(operation.box.sizes)


def test_every_box_is_aligned_and_none_overlaps() -> None:
    layout = message_layout(OPERATIONS, DTYPES)
    spans = []
    for box, operation in zip(layout.boxes(torch.empty(layout.num_bytes, dtype=torch.uint8)), OPERATIONS, strict=True):
        first = box.storage_offset() * box.itemsize
        assert first % ALIGNMENT == 0 and box.numel() == operation.box.numel
        spans.append((first, first + box.nbytes))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.num_bytes == 32 + 32 + 16 + 16 + 16


def test_boxes_come_out_as_they_went_in() -> None:
    layout = message_layout(OPERATIONS, DTYPES)
    # Converted on the way in: the trainer's are float32 whatever travels.
    message = pack(layout, [values_of(each).float() for each in OPERATIONS], CPU)
    assert message.dtype == torch.uint8 and message.numel() == layout.num_bytes
    inside = torch.cat([torch.zeros(64, dtype=torch.uint8), message])[64:]  # of a larger buffer
    for box, part, operation in zip(layout.boxes(message), layout.boxes(inside), OPERATIONS, strict=True):
        assert str(box.dtype) == f"torch.{DTYPES[operation.entry]}"
        assert torch.equal(box.float(), values_of(operation).float().flatten()) and torch.equal(box, part)


def test_sources_and_targets_of_any_strides() -> None:
    """Bug 29: `.view` of what is not contiguous."""
    operations = [operation_of(1, Box((0, 0), (3, 4))), operation_of(1, Box((0, 0), (2, 6)))]
    sources = [torch.arange(12.).view(4, 3).T, torch.arange(24.).view(4, 6)[::2]]
    layout = message_layout(operations, DTYPES)
    boxes = layout.boxes(pack(layout, sources, CPU))
    targets = [torch.zeros(3, 8)[:, ::2], torch.zeros(6, 2).T]
    copy_all(targets, boxes)
    for source, target in zip(sources, targets, strict=True):
        assert not source.is_contiguous() and not target.is_contiguous() and torch.equal(source, target)


def test_the_address_of_a_box() -> None:
    tensor = torch.arange(48.).view(8, 6)[2:]
    address = Address("weight", 7, (6, 1))
    check_inside(tensor, address, (2, 3))
    assert torch.equal(Views([address], [(2, 3)]).of({"weight": tensor})[0], tensor[1:3, 1:4])


def test_contiguous_boxes_are_flat() -> None:
    tensor = torch.arange(48.).view(8, 6)
    addresses = [Address("weight", 12, (6, 1)), Address("weight", 1, (7, 6, 1)), Address("weight", 2, (6,))]
    whole, single, column = Views(addresses, [(2, 6), (1, 1, 4), (5,)]).of({"weight": tensor})
    assert torch.equal(whole, tensor[2:4].flatten()) and torch.equal(single, tensor[0, 1:5])
    assert torch.equal(column, tensor[:5, 2]) and not column.is_contiguous()


def test_views_are_kept_and_follow_their_tensor() -> None:
    """A parameter changes in place, loses its memory to an offload and gets it back, or becomes another tensor."""
    tensor = torch.arange(12.)
    views = Views([Address("weight", 4, (1,))], [(2,)])
    first = views.of({"weight": tensor})[0]
    tensor += 1
    assert views.of({"weight": tensor})[0] is first and first.tolist() == [5., 6.]
    storage, kept = tensor.untyped_storage(), tensor.clone()
    storage.resize_(0)
    storage.resize_(kept.untyped_storage().nbytes())
    tensor.copy_(kept + 1)
    assert views.of({"weight": tensor})[0].tolist() == [6., 7.]
    for other in (torch.arange(12.) * 2, torch.arange(12., dtype=torch.float64) * 2):
        found = views.of({"weight": other})[0]
        assert found.tolist() == [8., 10.] and found.dtype == other.dtype


@pytest.mark.parametrize(("address", "sizes"), [(Address("weight", 34, (6, 1)), (1, 3)),
                                                (Address("weight", -1, (6, 1)), (1, 3)),
                                                (Address("weight", 0, (6, 1)), (7, 6))])
def test_a_box_outside_of_its_tensor_is_refused(address: Address, sizes: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"weight \[6, 6\] .* has no box of"):
        check_inside(torch.zeros(6, 6), address, sizes)


def test_a_target_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"strides \[1, 6\] has no box"):
        check_inside(torch.zeros(6, 6).T, Address("weight", 0, (6, 1)), (1, 3))


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
