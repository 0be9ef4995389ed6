"""Converts padded rows of tokens to packed sequences.

Rollouts come as rows with padding on either side. The trainer's models take a token's position from its column and
attend to everything before it. Padding on the left would shift positions and be attended to. Therefore it is removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mimo.data.batch import PackedSequences
from mimo.rl.losses import SampledTokens

NO_LABEL = -1


@dataclass
class PackedRows:
    """The `t` tokens of some rows, packed sequence by sequence and padded to multiples.

    Attributes:
        input_ids: int64 `[1, t]`.
        labels: int64 `[1, t]`, the next token of the same sequence; `NO_LABEL` at its last token and for padding.
        position_ids: int64 `[1, t]`, from 0 in each sequence.
        is_padding: bool `[1, t]`.
        sequence_ids: int64 `[t]`, row of each token, and of the padding behind it; padding at the end has the number of
            rows as its id.
        packed: starts of the sequences with their own padding, and the padding at the end as one more sequence.
        source: int64 `[t]`, index in the flattened rows of the token that each position predicts; -1 for none.
        shape: rows and columns.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    is_padding: torch.Tensor
    sequence_ids: torch.Tensor
    packed: PackedSequences
    source: torch.Tensor
    shape: tuple[int, int]

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Move values of tokens, `[b, s]`, to the positions that predict these tokens, `[t]`; others get 0."""
        assert tuple(rows.shape) == self.shape, f"{list(rows.shape)} for rows {self.shape}"
        values = rows.reshape(-1)[self.source.clamp(min=0)]
        return torch.where(self.source >= 0, values, torch.zeros_like(values))

    def sampled(self, response_mask: torch.Tensor) -> SampledTokens:
        """Return the positions that predict sampled tokens. `response_mask` `[b, s]` is True at these tokens."""
        return SampledTokens(self.take(response_mask), self.sequence_ids, self.shape[0] + 1)


def pack_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, *, pad_token_id: int, multiple: int = 1, align: int = 1
) -> PackedRows:
    """Pack rows without their padding. Rows that differ only in padding give the same result.

    Args:
        input_ids: int64 `[b, s]`, on the host.
        attention_mask: bool `[b, s]`, True at tokens, which must be contiguous in every row.
        pad_token_id: token for padding at the end.
        multiple: `t` becomes a multiple of this, as sequence parallelism needs.
        align: each sequence is padded to a multiple of this, as context parallelism needs; a divisor of `multiple`.
            Causal layers never show this padding to the sequence's tokens.

    Raises:
        ValueError: a row has no token, or padding between tokens.
    """
    assert multiple % align == 0, f"rows of a multiple of {multiple}, sequences of {align}"
    starts, lengths = token_runs(attention_mask)
    num_rows, num_columns = input_ids.shape
    sizes = (lengths + align - 1) // align * align
    rest = -int(sizes.sum()) % multiple
    # For each position of the packed row: its sequence, its position there, and the column where its token lies.
    sequence_ids = torch.repeat_interleave(torch.arange(num_rows), sizes)
    position_ids = torch.arange(len(sequence_ids)) - (sizes.cumsum(0) - sizes)[sequence_ids]
    # The last token of a sequence predicts nothing, and neither does the padding behind it.
    is_token, has_next = (position_ids + more < lengths[sequence_ids] for more in (0, 1))
    index = sequence_ids * num_columns + starts[sequence_ids] + position_ids
    flat = input_ids.reshape(-1)
    ids = torch.where(is_token, flat[torch.where(is_token, index, 0)], pad_token_id)
    source = torch.where(has_next, index + 1, -1)
    labels = torch.where(has_next, ids.roll(-1), NO_LABEL)
    # Padding at the end of the row is a sequence of its own, so that no token attends to it.
    boundaries, longest = [0, *sizes.cumsum(0).tolist()], int(sizes.max())
    if rest:
        boundaries, longest = [*boundaries, boundaries[-1] + rest], max(longest, rest)

    def filled(values: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([values, values.new_full((rest,), value)])

    sequence_ids = filled(sequence_ids, num_rows)
    return PackedRows(
        filled(ids, pad_token_id)[None], filled(labels, NO_LABEL)[None],
        torch.cat([position_ids, torch.arange(rest)])[None], filled(~is_token, True)[None], sequence_ids,
        PackedSequences(torch.tensor(boundaries, dtype=torch.int32), longest, sequence_ids[None].to(torch.int32)),
        filled(source, -1), (num_rows, num_columns))


def token_runs(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first column and the number of tokens of each row, int64 `[b]`.

    Raises:
        ValueError: a row has no token, or padding between tokens.
    """
    assert attention_mask.dtype == torch.bool, attention_mask.dtype
    lengths = attention_mask.sum(dim=1)
    starts = attention_mask.int().argmax(dim=1)
    columns = torch.arange(attention_mask.size(1), device=attention_mask.device)
    expected = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    for row in torch.nonzero((lengths == 0) | (expected != attention_mask).any(dim=1)).flatten().tolist():
        reason = "has no token" if lengths[row] == 0 else "has padding between its tokens"
        raise ValueError(f"row {row} of {len(lengths)} {reason}")
    return starts, lengths
