"""Which tokens each context-parallel rank computes, and attention of its tokens."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.data.batch import TextBatch
from mimo.data.collate import placeholder_positions
from mimo.data.context import positions, with_part

IMAGE = 9


@given(cp=st.integers(1, 5), chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_token_is_on_one_rank_and_work_is_even(cp: int, chunks: list[int]) -> None:
    stops, starts = [], []
    for chunk in chunks:
        starts.append(stops[-1] if stops else 0)
        stops.append(starts[-1] + 2 * cp * chunk)
    parts = [positions(stops, cp, rank) for rank in range(cp)]
    assert {len(part) for part in parts} == {stops[-1] // cp}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(stops[-1]))
    for start, stop in zip(starts, stops, strict=True):
        work = {int((part[(part >= start) & (part < stop)] - start + 1).sum()) for part in parts}
        assert len(work) == 1, "tokens of a sequence attend to as many tokens on every rank"


def text_batch(input_ids: torch.Tensor) -> TextBatch:
    return TextBatch(
        keys=("a", "b"), token_counts={"vision": tuple((input_ids == IMAGE).sum(dim=1).tolist())}, input_ids=input_ids,
        labels=input_ids, loss_mask=torch.ones(input_ids.shape), position_ids=torch.arange(16).expand(2, 16),
        placeholders={"vision": placeholder_positions(input_ids, IMAGE)}, num_tokens=32)


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
