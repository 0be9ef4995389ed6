"""Attention over packed rows: several sequences one behind the other that do not attend to each other."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from mimo.batch import PackedSequences


def packed_seq_params(sequences: PackedSequences | None) -> PackedSeqParams | None:
    """The wheel's description of packed rows in self-attention; None for rows that are not packed.

    The fields of padded sequences stay None: nothing lies between the sequences, padding is one of them, and
    Transformer Engine would compare the two lists in every layer, waiting for the device.
    """
    if sequences is None:
        return None
    starts, longest = sequences.cu_seqlens, sequences.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
                           max_seqlen_kv=longest, seq_idx=sequences.seq_idx)


class PackedDotProductAttention(DotProductAttention):
    """The wheel's PyTorch attention, which takes packed rows too: it then runs sequence by sequence.

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
        starts = packed_seq_params.cu_seqlens_q.tolist()
        assert starts[0] == 0 and starts[-1] == len(query), f"sequences {starts} of {len(query)} tokens"
        rows = [attend(query[start:stop, None], key[start:stop, None], value[start:stop, None], None, attn_mask_type,
                       attention_bias)
                for start, stop in zip(starts, starts[1:], strict=False) if start < stop]
        return torch.cat(rows)
