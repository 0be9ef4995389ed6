"""Packs whole sequences of tokens into one row, with the labels and values of the positions that predict them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mimo.data.batch import PackedSequences
from mimo.data.collate import packed_sequences, positions_of
from mimo.rl.batching import aligned

NO_LABEL = -1


@dataclass
class PackedRow:
    """A row of `t` positions: sequences one after the other, each with its own padding, and padding at the end.

    Attributes:
        input_ids: int64 `[1, t]`.
        labels: int64 `[1, t]`, the next token of the same sequence; `NO_LABEL` at its last token and for padding.
        position_ids: int64 `[1, t]`, from 0 in each sequence.
        is_padding: bool `[1, t]`.
        sequences: starts of the sequences. Padding at the end is one more sequence, so that no token attends to it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    is_padding: torch.Tensor
    sequences: PackedSequences

    def to_predictors(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Move values of tokens to the positions that predict these tokens, `[t]`; all other positions get 0.

        `values` has a value for each token of each sequence. That of a sequence's first token, which no position
        predicts, is dropped.
        """
        found = values[0].new_zeros(self.input_ids.shape[1])
        for start, own in zip(self.sequences.cu_seqlens.tolist(), values, strict=False):
            found[start:start + len(own) - 1] = own[1:]
        return found


def pack_sequences(
    sequences: Sequence[torch.Tensor], *, pad_token_id: int, multiple: int = 1, align: int = 1
) -> PackedRow:
    """Pack sequences into a row.

    Args:
        sequences: tokens of each sequence, int64, at least one.
        pad_token_id: token for padding.
        multiple: `t` becomes a multiple of this, as sequence parallelism needs.
        align: each sequence is padded to a multiple of this, as context parallelism needs; a divisor of `multiple`.
            Causal layers never show this padding to the sequence's tokens.
    """
    assert multiple % align == 0, f"rows of a multiple of {multiple}, sequences of {align}"
    ends = np.cumsum([aligned(len(tokens), align) for tokens in sequences])
    length = aligned(int(ends[-1]), multiple)
    packed = packed_sequences(ends, length)
    input_ids, labels = torch.full((length,), pad_token_id), torch.full((length,), NO_LABEL)
    is_padding = torch.ones(length, dtype=torch.bool)
    for start, tokens in zip(packed.cu_seqlens.tolist(), sequences, strict=False):
        input_ids[start:start + len(tokens)] = tokens
        labels[start:start + len(tokens) - 1] = tokens[1:]
        is_padding[start:start + len(tokens)] = False
    return PackedRow(input_ids[None], labels[None], positions_of(packed, length)[None], is_padding[None], packed)
