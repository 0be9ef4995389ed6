"""Rows with padding anywhere give the same packed tokens, and values go to the positions that predict them."""

import pytest
import torch

from mimo.rl.packing import NO_LABEL, pack_rows

SEQUENCES = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42]]
WIDTH, PAD = 7, 99
SIDES = {"right": lambda free: 0, "left": lambda free: free, "both": lambda free: free // 2}


def rows_of(side, fill=PAD, values=SEQUENCES):
    """Rows and mask, padded on that side."""
    rows, mask = torch.full((len(values), WIDTH), fill), torch.zeros(len(values), WIDTH, dtype=torch.bool)
    for row, sequence in enumerate(values):
        start = SIDES[side](WIDTH - len(sequence))
        rows[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = True
    return rows, mask


@pytest.mark.parametrize("side", SIDES)
def test_packed_by_hand(side):
    packed = pack_rows(*rows_of(side), pad_token_id=0)
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 31, 32, 33, 34, 35, 41, 42]]
    no = NO_LABEL
    assert packed.labels.tolist() == [[12, 13, no, no, 32, 33, 34, 35, no, 42, no]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]]
    assert packed.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert packed.packed.cu_seqlens.tolist() == [0, 3, 4, 9, 11] and packed.packed.max_seqlen == 5
    assert packed.packed.cu_seqlens.dtype == packed.packed.seq_idx.dtype == torch.int32
    assert packed.packed.seq_idx.tolist() == [packed.sequence_ids.tolist()]


def test_rows_without_padding():
    rows = torch.tensor([[1, 2], [3, 4]])
    packed = pack_rows(rows, torch.ones(2, 2, dtype=torch.bool), pad_token_id=0)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4]] and packed.labels.tolist() == [[2, NO_LABEL, 4, NO_LABEL]]


@pytest.mark.parametrize("multiple", [1, 4, 11, 64])
def test_padding_at_the_end_is_a_sequence_of_its_own(multiple):
    packed = pack_rows(*rows_of("left"), pad_token_id=7, multiple=multiple)
    length = -(-11 // multiple) * multiple
    extra = length - 11
    assert packed.input_ids.shape == packed.labels.shape == packed.position_ids.shape == (1, length)
    assert packed.input_ids[0, 11:].tolist() == [7] * extra and packed.labels[0, 11:].tolist() == [NO_LABEL] * extra
    assert packed.packed.cu_seqlens.tolist() == [0, 3, 4, 9, 11] + [length] * (extra > 0)
    assert packed.packed.max_seqlen == max(5, extra)
    assert packed.sequence_ids[11:].tolist() == [4] * extra and packed.position_ids[0, 11:].tolist() == [*range(extra)]


def test_sequences_of_a_multiple_have_their_own_padding():
    packed = pack_rows(*rows_of("both"), pad_token_id=7, align=4, multiple=8)
    no = NO_LABEL
    assert packed.input_ids.tolist() == [[11, 12, 13, 7, 21, 7, 7, 7, 31, 32, 33, 34, 35, 7, 7, 7, 41, 42, 7, 7,
                                          7, 7, 7, 7]]
    assert packed.labels[0, :8].tolist() == [12, 13, no, no, no, no, no, no]
    assert packed.labels[0, 16:].tolist() == [42, no, no, no, no, no, no, no]
    assert packed.position_ids[0, :8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.packed.cu_seqlens.tolist() == [0, 4, 8, 16, 20, 24] and packed.packed.max_seqlen == 8
    assert packed.sequence_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 8 + [3] * 4 + [4] * 4
    assert packed.is_padding[0].tolist() == [each == 7 for each in packed.input_ids[0].tolist()]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("multiple", "align"), [(1, 1), (8, 1), (8, 8), (12, 4)])
def test_values_of_tokens_go_to_the_positions_that_predict_them(side, multiple, align):
    rows, mask = rows_of(side)
    packed = pack_rows(rows, mask, pad_token_id=0, multiple=multiple, align=align)
    taken = packed.take(rows)
    has_label = packed.labels[0] != NO_LABEL
    assert torch.equal(taken[has_label], packed.labels[0][has_label]) and (taken[~has_label] == 0).all()
    # All tokens but the first of each row.
    starts = mask & (mask.cumsum(1) == 1)
    assert torch.equal(taken[has_label], rows[mask & ~starts])


def test_sampled_tokens():
    rows, mask = rows_of("left")
    response = mask.clone()
    response[0, :5], response[2, :4] = False, False  # prompts of 1 and 2 tokens
    sampled = pack_rows(rows, mask, pad_token_id=0, multiple=8).sampled(response)
    # The positions before the sampled tokens; sequences of one token predict nothing.
    assert sampled.mask.nonzero().flatten().tolist() == [0, 1, 5, 6, 7, 9]
    assert sampled.num_sequences == 5 and sampled.lengths().tolist() == [2, 0, 3, 1, 0]
    assert sampled.sequence_means(torch.arange(16.0)).tolist() == [0.5, 0, 6, 9, 0]


@pytest.mark.parametrize(("row", "message"), [([0] * WIDTH, "row 1 of 2 has no token"),
                                              ([0, 1, 0, 1, 1, 0, 0], "row 1 of 2 has padding between its tokens")])
def test_rows_that_cannot_be_packed(row, message):
    mask = torch.tensor([[1] * WIDTH, row]).bool()
    with pytest.raises(ValueError, match=message):
        pack_rows(torch.zeros(2, WIDTH, dtype=torch.int64), mask, pad_token_id=0)
