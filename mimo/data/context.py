"""Division of the tokens of a row among context-parallel ranks.

A causal token attends to all tokens before it, so the end of a sequence costs more than its start. Each sequence is
therefore cut into `2 * cp` chunks, and rank r takes chunk r and chunk `2 * cp - 1 - r`. Megatron Core's rotary
positions and Transformer Engine's attention expect this order, with the sequences of a packed row one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from mimo.data.batch import ContextPart, TextBatch


def positions(stops: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Return the positions of a context-parallel rank's tokens in their row, int64 `[stops[-1] / cp]`.

    `stops` has the end of each sequence, whose length is a multiple of `2 * cp`.
    """
    found = []
    for start, stop in itertools.pairwise((0, *stops)):
        chunk, rest = divmod(stop - start, 2 * cp)
        assert not rest, f"{stop - start} tokens from {start} on are not a multiple of 2 * {cp}"
        found += [torch.arange(start + rank * chunk, start + (rank + 1) * chunk),
                  torch.arange(stop - (rank + 1) * chunk, stop - rank * chunk)]
    return torch.cat(found)


def with_part(text: TextBatch, cp: int, rank: int) -> TextBatch:
    """Return a microbatch with the tokens of one context-parallel rank in `part`; itself if `cp` is 1."""
    if cp == 1:
        return text
    samples, length = text.input_ids.shape
    stops = (length,) if text.packed is None else text.packed.cu_seqlens[1:].tolist()
    index = positions(stops, cp, rank)
    local = torch.full((length,), -1)
    local[index] = torch.arange(len(index))
    owner = torch.empty(length, dtype=torch.uint8)
    for other in range(cp):
        owner[positions(stops, cp, other)] = other
    rows, slots, owners = {}, {}, {}
    for module, placeholders in text.placeholders.items():
        own = local[placeholders // samples]
        rows[module] = (own >= 0).nonzero().flatten()
        slots[module] = (own * samples + placeholders % samples)[rows[module]]
        owners[module] = owner[placeholders // samples]
    return replace(text, part=ContextPart(index, rows, slots, owners))
