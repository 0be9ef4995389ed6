"""Attention in plain PyTorch, and multi-head latent attention with any implementation.

The sequences of a packed row do not attend to each other. The tokens of a shared row are divided over context-parallel
ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mimo.data.batch import ContextPart, PackedSequences, context_positions
from mimo.model import compat

# Most scores of one head that are in memory at a time, for all sequences that run as one batch.
MAX_SCORES = 1 << 20


def packed_seq_params(sequences: PackedSequences | None, part: ContextPart | None = None, *, few_shapes: bool = False
                      ) -> PackedSeqParams | None:
    """Return Megatron Core's description of packed rows in self-attention; None for rows that are not packed.

    There are no gaps between the sequences: padding is one of them, or belongs to the end of one. Without context
    parallelism the fields of padded sequences stay None. Otherwise Transformer Engine would compare them with the other
    fields in every layer, and wait for the device.

    Args:
        sequences: starts of the sequences of whole rows.
        part: the tokens of this rank if context-parallel ranks share the rows. Transformer Engine then needs the
            fields of padded sequences, and to know that there are no gaps.
        few_shapes: whether to round up the number of sequences and the longest one's length to powers of two, as far as
            the row has room for it. Sequences that are added have no tokens.
    """
    if sequences is None:
        return None
    starts, longest = sequences.cu_seqlens, sequences.max_seqlen
    length = longest if sequences.seq_idx is None else sequences.seq_idx.shape[-1]
    if few_shapes and longest < length:
        missing = (1 << (len(starts) - 2).bit_length()) + 1 - len(starts)
        starts = torch.nn.functional.pad(starts, (0, missing), value=length)
        longest = min(1 << (longest - 1).bit_length(), length - 1)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
                             max_seqlen_kv=longest, seq_idx=sequences.seq_idx)
    if part is not None:
        if longest == len(part.index):
            # `apply_packed_rotary` takes as many rotary frequencies as the rank has tokens for those of its tokens.
            # These are frequencies of positions in a sequence, so there must be a different number of them.
            params.max_seqlen_q = params.max_seqlen_kv = 2 * longest
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = starts
        params.pad_between_seqs = False
    return params


class PackedDotProductAttention(DotProductAttention):
    """Megatron Core's PyTorch attention, for packed rows as well: sequences of equal length are rows of a batch.

    Scale, mask, softmax precision and dropout are therefore the same as for samples in rows of their own.
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
            key: shaped like `query`, with the heads of the key groups.
            value: shaped like `key`, but its channels may differ.
            attention_mask: True where attention is forbidden. None takes the mask type that the layer was built with,
                and is required for packed rows.
            attn_mask_type: no effect, because the layer was built with it.
            attention_bias: None.
            packed_seq_params: starts of the sequences of a packed row.

        Returns:
            `[s, b, heads * channels]`; packed `[t, 1, heads * channels]`.
        """
        attend = super().forward
        if packed_seq_params is None:
            return attend(query, key, value, attention_mask, attn_mask_type, attention_bias)
        assert attention_mask is None, "sequences of a packed row have no mask of their own"
        groups, order = together(packed_seq_params, query)
        found = [attend(query[tokens], key[tokens], value[tokens], None, attn_mask_type, attention_bias).flatten(0, 1)
                 for tokens in groups]
        return torch.cat(found)[order, None]


class ContextParallelAttention(PackedDotProductAttention):
    """Causal attention of the rows that context-parallel ranks share, in plain PyTorch.

    Each rank has the queries of its own tokens and gathers the keys and values of all ranks. The backward pass of that
    gather sums their gradients. With more ranks, the scores of a rank take less memory, but the gathered keys and
    values do not. Transformer Engine's attention, which GPUs use, moves them in pieces.

    Args:
        config: sizes and dropout.
        layer_number: global number of the layer, from 1.
        attn_mask_type: causal.
        attention_type: `self`.
        cp_comm_type: no effect, because keys and values are always gathered.
        pg_collection: the module's groups.
        sizes: further arguments of `DotProductAttention`.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
                 *, pg_collection: ProcessGroupCollection, cp_comm_type: str | None = None, **sizes: Any) -> None:
        assert attn_mask_type is AttnMaskType.causal, attn_mask_type
        # Megatron Core's class refuses context parallelism. Each call below is an attention of one rank.
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
        """Attend from this rank's tokens to themselves and all earlier tokens of their sequences.

        Arguments and shapes are those of `PackedDotProductAttention`, with `s / cp` tokens.
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
        to_row: int64 `[s]`, index of each token of a row among the concatenated tokens of all ranks.
        parts: for each part, the indices of its queries among this rank's tokens, the indices of its keys in the row,
            and a mask of forbidden attention, bool `[1, 1, queries, keys]`.
        order: index of each of this rank's tokens among the queries of all parts; None for rows that are not packed.
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
        """Return the chunks of packed sequences, those of equal length together. They are kept as in `together`."""
        kept: _Chunks | None = vars(packed).get("_chunks")
        if kept is None:
            cp, starts, parts, queries = group.size(), packed.cu_seqlens_q.tolist(), [], []
            assert starts[0] == 0 and starts[-1] == len(query) * cp, f"sequences {starts}, {len(query)} tokens of {cp}"
            for length, firsts in equal_lengths(starts):
                chunk, begins = length // (2 * cp), torch.tensor(firsts)
                for half, number in enumerate((group.rank(), 2 * cp - 1 - group.rank())):
                    own = begins // cp + half * chunk + torch.arange(chunk)[:, None]
                    seen = begins + torch.arange((number + 1) * chunk)[:, None]
                    parts.append((own.to(query.device), seen.to(query.device), _forbidden(number, chunk, query)))
                    queries.append(own.flatten())
            kept = packed._chunks = cls(_to_row(starts[1:], cp, query), parts,
                                        torch.cat(queries).argsort().to(query.device))
        return kept


def _to_row(stops: Sequence[int], cp: int, query: torch.Tensor) -> torch.Tensor:
    return torch.cat([context_positions(stops, cp, rank) for rank in range(cp)]).argsort().to(query.device)


def _forbidden(number: int, chunk: int, query: torch.Tensor) -> torch.Tensor:
    """Return which of the keys up to a chunk's end its queries do not see, bool `[1, 1, queries, keys]`."""
    keys = torch.arange((number + 1) * chunk, device=query.device)
    return (keys[number * chunk :, None] < keys)[None, None]


def together(packed: PackedSeqParams, query: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Group the tokens of a packed row into sequences of equal length.

    Every layer asks for the groups, but only the first one makes them, because reading the starts of the sequences
    waits for the device. They are kept with the row.

    Args:
        packed: starts of the sequences.
        query: `[t, heads, channels]`.

    Returns:
        The indices of the tokens of each group, int64 `[length, sequences]`, and the index of each token of the row
        among the tokens of all groups.
    """
    kept = vars(packed).get("_together")
    if kept is None:
        starts = packed.cu_seqlens_q.tolist()
        assert starts[0] == 0 and starts[-1] == len(query), f"sequences {starts} of {len(query)} tokens"
        groups = [torch.tensor(firsts) + torch.arange(length)[:, None] for length, firsts in equal_lengths(starts)]
        order = torch.cat([tokens.flatten() for tokens in groups]).argsort()
        kept = [tokens.to(query.device) for tokens in groups], order.to(query.device)
        packed._together = kept
    return kept


def equal_lengths(starts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Group sequences of equal length, which run as one batch.

    Args:
        starts: start of each sequence, and end of the last one.

    Returns:
        For each batch the length of its sequences and their starts. A batch has at most `MAX_SCORES` scores, unless it
        is one sequence.
    """
    firsts: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise(starts):
        if start < stop:
            firsts.setdefault(stop - start, []).append(start)
    return [(length, list(some)) for length, found in firsts.items()
            for some in itertools.batched(found, max(1, MAX_SCORES // length**2))]


class _WideQueries(DotProductAttention):
    """Base class of PyTorch attention for heads whose queries and keys are wider than their values.

    Args:
        attention: positional arguments of Megatron Core's `DotProductAttention`.
        k_channels: no effect; the tensors themselves show the channels of a query or key.
        v_channels: channels of a value; None: `config.kv_channels`.
        options: keyword arguments of `DotProductAttention`.
    """

    def __init__(self, *attention: Any, k_channels: int | None = None, v_channels: int | None = None,
                 **options: Any) -> None:
        super().__init__(*attention, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentDotProductAttention(_WideQueries, PackedDotProductAttention):
    """Latent attention's scores and weighted values in plain PyTorch."""


class LatentContextParallelAttention(_WideQueries, ContextParallelAttention):
    """`LatentDotProductAttention` for rows that context-parallel ranks share."""


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) for grids with their own groups.

    It builds exactly the layers of its spec. Megatron Core's class has these faults, which are corrected here:

    - It takes the tensor-parallel group of two collectives from global state, and gives one projection no group.
    - It loses part of the rotary key's gradient with column-parallel down projections.
    - It asks for a norm that queries without a low-rank projection do not have.
    - It saves replicated projections of Transformer Engine once for each tensor-parallel rank.
    - It cannot be built with Megatron Core's own PyTorch attention.

    On a tensor-parallel grid it needs sequence parallelism. Otherwise each rank would only have the part of the rotary
    key's gradient that comes from its own heads.
    """

    config: MLATransformerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Transformer Engine's replicated layers are built without a group. Then every tensor-parallel rank would save
        # its copy.
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):
                compat.set_tensor_parallel_group(getattr(self, name), self.tp_group)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # Megatron Core would put a norm before `linear_q_proj` wherever keys have one.
        assert self.config.sequence_parallel or self.tp_group.size() == 1, "latent attention needs --sequence-parallel"
        return {
            "linear_q_proj": ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": self.tp_group}),
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Megatron Core widens the values of packed rows to the channels of queries and keys. On H100 GPUs the
        # gradients of both were then wrong (tests/gpu/test_context_parallel.py -k latent-packed).
        if kwargs.get("attn_mask_type") is None:
            kwargs["attn_mask_type"] = self.attn_mask_type
        return self.core_attention(query, key, value, attention_mask, **kwargs)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed query, and the compressed key-value with the rotary key.

        Without `q_lora_rank`, the query is the input itself. Both have the shape `[s, b, columns]`, where `s` is this
        rank's part of the sequence with sequence parallelism.
        """
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._whole(self.linear_q_down_proj(hidden_states)[0], self.config.q_lora_rank)
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        return query, self._whole(self.linear_kv_down_proj(hidden_states)[0], width)

    def _whole(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Return all columns for this rank's tokens, given the output of a column-parallel or replicated projection."""
        if part.size(-1) == width:
            return part
        # Megatron Core then gathers the rotary key over the sequence. The backward pass of that gather sums the
        # gradients from each rank's heads.
        return scatter_to_sequence_parallel_region(
            gather_from_tensor_model_parallel_region(part, group=self.tp_group), group=self.tp_group
        )


def with_epsilon(norm: Any, epsilon: float) -> Callable[..., torch.nn.Module]:
    """Return a builder of `norm` that uses `epsilon` instead of the layer's."""

    def build(*, config: MLATransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        built: torch.nn.Module = norm(config=config, hidden_size=hidden_size, eps=epsilon)
        return built

    return build
