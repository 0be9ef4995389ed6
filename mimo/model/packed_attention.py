"""Attention in plain PyTorch: over packed rows, whose sequences do not attend to each other, and over rows that
context-parallel ranks share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.data.batch import ContextPart, PackedSequences
from mimo.data.context import positions

# Of one head: sequences that run together hold their scores at the same time.
MAX_SCORES = 1 << 20


def packed_seq_params(sequences: PackedSequences | None, part: ContextPart | None = None) -> PackedSeqParams | None:
    """Megatron Core's description of packed rows in self-attention; None for rows that are not packed.

    Nothing lies between the sequences: padding is one of them, or belongs to the end of one. Without context
    parallelism the fields of padded sequences stay None, because Transformer Engine would compare the two lists in
    every layer, waiting for the device.

    Args:
        sequences: where the sequences of whole rows start.
        part: the tokens of this rank where context-parallel ranks share the rows. Transformer Engine then wants the
            fields of padded sequences, and is told that nothing lies between them.
    """
    if sequences is None:
        return None
    starts, longest = sequences.cu_seqlens, sequences.max_seqlen
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
                             max_seqlen_kv=longest, seq_idx=sequences.seq_idx)
    if part is not None:
        if longest == len(part.index):
            # As many rotary frequencies as the rank has tokens are those of the tokens (`apply_packed_rotary`), so
            # there must be others than these of positions in a sequence.
            params.max_seqlen_q = params.max_seqlen_kv = 2 * longest
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = starts
        params.pad_between_seqs = False
    return params


class PackedDotProductAttention(DotProductAttention):
    """Megatron Core's PyTorch attention, which takes packed rows too: sequences of one length are then rows of a batch.

    So scale, mask, softmax precision and dropout are those of the same samples in rows of their own.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend within every sequence.

        Args:
            query: `[s, b, heads, channels]`; packed `[t, heads, channels]`. Heads are those of this rank.
            key: as `query`, with the heads of the key groups.
            value: as `key`, its channels may differ.
            attention_mask: True where attention is forbidden; None with packed rows; None elsewhere is the mask that
                the layer was built with.
            attn_mask_type: no effect, the layer was built with it.
            attention_bias: None.
            packed_seq_params: where the sequences of a packed row start.

        Returns:
            `[s, b, heads * channels]`; packed `[t, 1, heads * channels]`.
        """
        attend = super().forward
        if packed_seq_params is None:
            return attend(query, key, value, attention_mask, attn_mask_type, attention_bias)
        assert attention_mask is None, "sequences of a packed row have no mask of their own"
        groups, order = together(packed_seq_params, query)
        found = [attend(query[place], key[place], value[place], None, attn_mask_type, attention_bias).flatten(0, 1)
                 for place in groups]
        return torch.cat(found)[order, None]


class ContextParallelAttention(PackedDotProductAttention):
    """Causal attention of the rows that context-parallel ranks share, in plain PyTorch.

    Each rank has the queries of its own tokens and gathers the keys and values of all ranks; the backward pass of that
    gather sums their gradients. Scores take the memory of a rank's own queries, gathered keys and values do not get
    smaller with more ranks. Transformer Engine's attention, which GPUs use, moves them in pieces.

    Args:
        config: sizes and dropout.
        layer_number: global number of the layer, from 1.
        attn_mask_type: causal.
        attention_type: `self`.
        cp_comm_type: no effect, keys and values are gathered.
        pg_collection: the module's groups.
        sizes: further arguments of `DotProductAttention`.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
                 *, pg_collection: ProcessGroupCollection, cp_comm_type: str | None = None, **sizes: Any) -> None:
        assert attn_mask_type is AttnMaskType.causal, attn_mask_type
        # Megatron Core's class refuses context parallelism, and the calls below are those of one rank.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, layer_number, attn_mask_type, attention_type, pg_collection=pg_collection, **sizes)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend from this rank's tokens to all tokens of their rows that are not behind them.

        Args and shapes are those of `PackedDotProductAttention`, with `s / cp` tokens.
        """
        assert attention_mask is None, "causal attention needs no other mask"
        packed = packed_seq_params
        chunks = _Chunks.of_rows(self.cp_group, query) if packed is None else _Chunks.of_packed(
            self.cp_group, packed, query)
        channels = key.shape[-1]
        # One collective for both. Its backward pass sums the gradients of all ranks and scatters them.
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
        gathered = gathered.index_select(0, chunks.to_row)
        key, value = gathered[..., :channels].contiguous(), gathered[..., channels:].contiguous()
        attend = DotProductAttention.forward
        found = [attend(self, query[own], key[seen], value[seen], forbidden, attn_mask_type, attention_bias)
                 for own, seen, forbidden in chunks.parts]
        if packed is None:
            return torch.cat(found)
        return torch.cat([part.flatten(0, 1) for part in found])[chunks.order, None]


@dataclass(frozen=True)
class _Chunks:
    """The chunks of sequences whose queries a context-parallel rank has, and the keys that they see.

    Attributes:
        to_row: int64 `[s]`, where each token of a row is among the tokens of all ranks, one rank behind the other.
        parts: for each part, places of its queries among this rank's tokens, places of its keys in the row, and where
            attention is forbidden, bool `[1, 1, queries, keys]`.
        order: packed rows: where each of this rank's tokens is among the queries of all parts.
    """

    to_row: torch.Tensor
    parts: list[tuple[Any, Any, torch.Tensor]]
    order: torch.Tensor | None = None

    @classmethod
    def of_rows(cls, group: dist.ProcessGroup, query: torch.Tensor) -> _Chunks:
        """Return the two chunks of rows that are one sequence each."""
        cp, chunk = group.size(), len(query) // 2
        parts: list[tuple[Any, Any, torch.Tensor]] = []
        for half, number in enumerate((group.rank(), 2 * cp - 1 - group.rank())):
            own, seen = slice(half * chunk, (half + 1) * chunk), slice((number + 1) * chunk)
            parts.append((own, seen, _forbidden(number, chunk, query)))
        return cls(_to_row((2 * cp * chunk,), cp, query), parts)

    @classmethod
    def of_packed(cls, group: dist.ProcessGroup, packed: PackedSeqParams, query: torch.Tensor) -> _Chunks:
        """Return the chunks of packed sequences, those of equal length together. Kept as in `together`."""
        kept: _Chunks | None = vars(packed).get("_chunks")
        if kept is None:
            cp, starts, parts, places = group.size(), packed.cu_seqlens_q.tolist(), [], []
            assert starts[0] == 0 and starts[-1] == len(query) * cp, f"sequences {starts}, {len(query)} tokens of {cp}"
            for length, firsts in equal_lengths(starts):
                chunk, begins = length // (2 * cp), torch.tensor(firsts)
                for half, number in enumerate((group.rank(), 2 * cp - 1 - group.rank())):
                    own = begins // cp + half * chunk + torch.arange(chunk)[:, None]
                    seen = begins + torch.arange((number + 1) * chunk)[:, None]
                    parts.append((own.to(query.device), seen.to(query.device), _forbidden(number, chunk, query)))
                    places.append(own.flatten())
            kept = packed._chunks = cls(_to_row(starts[1:], cp, query), parts,
                                        torch.cat(places).argsort().to(query.device))
        return kept


def _to_row(stops: Sequence[int], cp: int, query: torch.Tensor) -> torch.Tensor:
    return torch.cat([positions(stops, cp, rank) for rank in range(cp)]).argsort().to(query.device)


def _forbidden(number: int, chunk: int, query: torch.Tensor) -> torch.Tensor:
    """Return which keys up to a chunk's end its queries do not see."""
    keys = torch.arange((number + 1) * chunk, device=query.device)
    return (keys[number * chunk :, None] < keys)[None, None]


def together(packed: PackedSeqParams, query: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Group the tokens of a packed row that are attended together.

    Asked for in every layer and found in the first: where sequences start lies on the device, which must be waited for.

    Args:
        packed: where the sequences start.
        query: `[t, heads, channels]`.

    Returns:
        Groups of sequences of one length, int64 `[length, sequences]` each: places of tokens. And where each token is
        among those of all groups.
    """
    kept = vars(packed).get("_together")
    if kept is None:
        starts = packed.cu_seqlens_q.tolist()
        assert starts[0] == 0 and starts[-1] == len(query), f"sequences {starts} of {len(query)} tokens"
        groups = [torch.tensor(firsts) + torch.arange(length)[:, None] for length, firsts in equal_lengths(starts)]
        order = torch.cat([place.flatten() for place in groups]).argsort()
        kept = [place.to(query.device) for place in groups], order.to(query.device)
        packed._together = kept
    return kept


def equal_lengths(starts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Group sequences of equal length, which run as one batch.

    Args:
        starts: where each begins, and where the last one ends.

    Returns:
        A length, and where sequences of that length begin: so many at once that their scores stay few.
    """
    firsts: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise(starts):
        if start < stop:
            firsts.setdefault(stop - start, []).append(start)
    return [(length, list(some)) for length, found in firsts.items()
            for some in itertools.batched(found, max(1, MAX_SCORES // length**2))]
