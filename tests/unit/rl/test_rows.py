"""Sequences packed into a row, and values that go to the positions that predict their tokens."""

import pytest
import torch

from mimo.rl.losses import SampledTokens
from mimo.rl.packing import NO_LABEL, pack_sequences

SEQUENCES = [torch.tensor(each) for each in ([11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42])]


def test_packed_by_hand():
    row = pack_sequences(SEQUENCES, pad_token_id=0)
    assert row.input_ids.tolist() == [[11, 12, 13, 21, 31, 32, 33, 34, 35, 41, 42]]
    no = NO_LABEL
    assert row.labels.tolist() == [[12, 13, no, no, 32, 33, 34, 35, no, 42, no]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]]
    assert row.sequences.cu_seqlens.tolist() == [0, 3, 4, 9, 11] and row.sequences.max_seqlen == 5
    assert row.sequences.cu_seqlens.dtype == row.sequences.seq_idx.dtype == torch.int32
    assert row.sequences.seq_idx.tolist() == [[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]]


@pytest.mark.parametrize("multiple", [1, 4, 11, 64])
def test_padding_at_the_end_is_a_sequence_of_its_own(multiple):
    row = pack_sequences(SEQUENCES, pad_token_id=7, multiple=multiple)
    length = -(-11 // multiple) * multiple
    extra = length - 11
    assert row.input_ids.shape == row.labels.shape == row.position_ids.shape == row.is_padding.shape == (1, length)
    assert row.input_ids[0, 11:].tolist() == [7] * extra and row.labels[0, 11:].tolist() == [NO_LABEL] * extra
    assert row.sequences.cu_seqlens.tolist() == [0, 3, 4, 9, 11] + [length] * (extra > 0)
    assert row.sequences.max_seqlen == max(5, extra)
    assert row.sequences.seq_idx[0, 11:].tolist() == [4] * extra
    assert row.position_ids[0, 11:].tolist() == [*range(extra)]


def test_sequences_of_a_multiple_have_their_own_padding():
    row = pack_sequences(SEQUENCES, pad_token_id=7, align=4, multiple=8)
    no = NO_LABEL
    assert row.input_ids.tolist() == [[11, 12, 13, 7, 21, 7, 7, 7, 31, 32, 33, 34, 35, 7, 7, 7, 41, 42, 7, 7,
                                       7, 7, 7, 7]]
    assert row.labels[0, :8].tolist() == [12, 13, no, no, no, no, no, no]
    assert row.labels[0, 16:].tolist() == [42, no, no, no, no, no, no, no]
    assert row.position_ids[0, :8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert row.sequences.cu_seqlens.tolist() == [0, 4, 8, 16, 20, 24] and row.sequences.max_seqlen == 8
    assert row.sequences.seq_idx[0].tolist() == [0] * 4 + [1] * 4 + [2] * 8 + [3] * 4 + [4] * 4
    assert row.is_padding[0].tolist() == [each == 7 for each in row.input_ids[0].tolist()]


@pytest.mark.parametrize(("multiple", "align"), [(1, 1), (8, 1), (8, 8), (12, 4)])
def test_values_of_tokens_go_to_the_positions_that_predict_them(multiple, align):
    row = pack_sequences(SEQUENCES, pad_token_id=0, multiple=multiple, align=align)
    moved = row.to_predictors(SEQUENCES)
    has_label = row.labels[0] != NO_LABEL
    assert torch.equal(moved[has_label], row.labels[0][has_label]) and (moved[~has_label] == 0).all()
    # All tokens but the first of each sequence.
    assert torch.equal(moved[has_label], torch.cat([each[1:] for each in SEQUENCES]))


def test_sampled_tokens():
    row = pack_sequences(SEQUENCES, pad_token_id=0, multiple=8)
    prompts = (1, 0, 2, 0)
    mask = row.to_predictors([torch.arange(len(each)) >= prompt
                              for each, prompt in zip(SEQUENCES, prompts, strict=True)])
    sampled = SampledTokens(mask, row.sequences.seq_idx[0].long(), len(SEQUENCES) + 1)
    # The positions before the sampled tokens; sequences of one token predict nothing.
    assert sampled.mask.nonzero().flatten().tolist() == [0, 1, 5, 6, 7, 9]
    assert sampled.lengths().tolist() == [2, 0, 3, 1, 0]
    assert sampled.sequence_means(torch.arange(16.0)).tolist() == [0.5, 0, 6, 9, 0]
