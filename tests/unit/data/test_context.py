"""Which tokens each context-parallel rank computes, and attention of its tokens."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.data.batch import TextBatch, context_positions, with_part
from mimo.data.collate import Placeholders, collate_text
from mimo.protocols import Sample

IMAGE = 9


@given(cp=st.integers(1, 5), chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_token_is_on_one_rank_and_work_is_even(cp: int, chunks: list[int]) -> None:
    stops, starts = [], []
    for chunk in chunks:
        starts.append(stops[-1] if stops else 0)
        stops.append(starts[-1] + 2 * cp * chunk)
    parts = [context_positions(stops, cp, rank) for rank in range(cp)]
    assert {len(part) for part in parts} == {stops[-1] // cp}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(stops[-1]))
    for start, stop in zip(starts, stops, strict=True):
        work = {int((part[(part >= start) & (part < stop)] - start + 1).sum()) for part in parts}
        assert len(work) == 1, "tokens of a sequence attend to as many tokens on every rank"


def places_of(input_ids: torch.Tensor, token: int) -> torch.Tensor:
    """Places of a token in rows `[b, s]`, row by row, as indices into `[s * b]`."""
    row, place = (input_ids == token).nonzero(as_tuple=True)
    return place * input_ids.shape[0] + row


def text_batch(input_ids: torch.Tensor) -> TextBatch:
    return TextBatch(
        keys=("a", "b"), token_counts={"vision": tuple((input_ids == IMAGE).sum(dim=1).tolist())}, input_ids=input_ids,
        labels=input_ids, loss_mask=torch.ones(input_ids.shape), position_ids=torch.arange(16).expand(2, 16),
        placeholders={"vision": places_of(input_ids, IMAGE)}, num_tokens=32)


def test_each_row_of_the_encoder_goes_where_its_placeholder_is() -> None:
    input_ids = torch.arange(32).view(2, 16) + 100
    input_ids[0, 3:7] = input_ids[1, 0] = input_ids[1, 12:15] = IMAGE  # before, after and across the ends of chunks
    whole = text_batch(input_ids)
    features, seen = torch.arange(8), []
    expected = input_ids.clone()
    expected[0, 3:7], expected[1, 0], expected[1, 12:15] = features[:4], features[4], features[5:]
    for rank in range(2):
        text = with_part(whole, 2, rank)
        assert text.part is not None
        merged = text.own(input_ids).T.flatten()
        merged[text.part.slots["vision"]] = features[text.part.rows["vision"]]
        assert torch.equal(merged.view(8, 2).T, text.own(expected))
        seen += text.part.rows["vision"].tolist()
    assert sorted(seen) == features.tolist()


def test_one_rank_has_the_batch_as_it_is() -> None:
    whole = text_batch(torch.zeros(2, 16, dtype=torch.int64))
    assert with_part(whole, 1, 0) is whole and whole.own(whole.labels) is whole.labels
    assert {each.name for each in fields(whole)} >= {"part"}


def pack(*lengths: int) -> Sample:
    tokens = np.arange(sum(lengths)) + 10
    return Sample("a b c", tokens, tokens > 0, lengths=lengths)


def collated(sample: Sample, multiple: int) -> TextBatch:
    return collate_text([sample], images=Placeholders({}, lambda *size: 0), seq_length=24, vocab_size=99,
                        pad_token_id=0, sequence_multiple=multiple)


def test_samples_of_a_pack_are_padded_each_at_its_end() -> None:
    text = collated(pack(5, 1, 8), 4)
    assert text.packed is not None and text.packed.cu_seqlens.tolist() == [0, 8, 12, 20, 24]
    assert text.input_ids[0].tolist() == [*range(10, 15), 0, 0, 0, 15, 0, 0, 0, *range(16, 24), 0, 0, 0, 0]
    assert text.labels[0, :8].tolist() == [11, 12, 13, 14, 0, 0, 0, 0]
    assert text.loss_mask[0].nonzero().flatten().tolist() == [0, 1, 2, 3, *range(12, 19)]
    assert text.position_ids[0].tolist() == [*range(8), *range(4), *range(8), *range(4)]
    assert text.num_tokens == 14 and text.lengths == ((5, 1, 8),)
    alone = collated(pack(5, 1, 8), 1)
    assert alone.packed is not None and alone.packed.cu_seqlens.tolist() == [0, 5, 6, 14, 24]
    assert alone.input_ids[0, :14].tolist() == list(range(10, 24))
    whole = torch.cat([with_part(text, 2, rank).own(text.input_ids) for rank in range(2)], dim=1)
    assert torch.equal(whole.sort().values, text.input_ids.sort().values)


def test_a_pack_without_room_for_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="sample a b c: its 3 samples have 28 tokens, each padded to a multiple of 4"):
        collated(pack(9, 9, 1), 4)
