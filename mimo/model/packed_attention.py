"""Attention in plain PyTorch: over packed rows, whose sequences do not attend to each other, and over rows that
context-parallel ranks share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.data.batch import PackedSequences
from mimo.data.context import positions

# Of one head: sequences that run together hold their scores at the same time.
MAX_SCORES = 1 << 20


def packed_seq_params(sequences: PackedSequences | None) -> PackedSeqParams | None:
    """Megatron Core's description of packed rows in self-attention; None for rows that are not packed.

    The fields of padded sequences stay None: nothing lies between the sequences, padding is one of them, and
    Transformer Engine would compare the two lists in every layer, waiting for the device.
    """
    if sequences is None:
        return None
    starts, longest = sequences.cu_seqlens, sequences.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
                           max_seqlen_kv=longest, seq_idx=sequences.seq_idx)


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

        Args and shapes are those of `PackedDotProductAttention`, with `s / cp` tokens; rows are not packed.
        """
        assert attention_mask is None and packed_seq_params is None, "causal attention of rows that are not packed"
        cp, channels, length = self.cp_group.size(), key.shape[-1], len(query) * self.cp_group.size()
        # One collective for both. Its backward pass sums the gradients of all ranks and scatters them.
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
        places = [positions((length,), cp, rank) for rank in range(cp)]
        gathered = gathered.index_select(0, torch.cat(places).argsort().to(query.device))
        key, value = gathered[..., :channels].contiguous(), gathered[..., channels:].contiguous()
        own, found = places[self.cp_group.rank()].to(query.device), []
        for chunk in range(2):
            rows = slice(chunk * len(own) // 2, (chunk + 1) * len(own) // 2)
            number = self.cp_group.rank() if chunk == 0 else 2 * cp - 1 - self.cp_group.rank()
            stop = (number + 1) * len(own) // 2
            forbidden = own[rows, None] < torch.arange(stop, device=query.device)
            found.append(super().forward(query[rows], key[:stop], value[:stop], forbidden[None, None], attn_mask_type,
                                         attention_bias))
        return torch.cat(found)


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
