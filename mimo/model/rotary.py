"""Rotary positions of packed rows in one go.

The wheel's PyTorch path applies them sequence by sequence and asks the device where each begins: hundreds of
completions of a few tokens each then take seconds of launches in every pass.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

_one_by_one = rope_utils._apply_rotary_pos_emb_thd


def apply_packed_rotary(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any,
                        cp_group: Any = None, **kwargs: Any) -> torch.Tensor:
    """Rotary positions of a packed row; as the wheel's function for `thd`, bit for bit, without waiting for the device.

    Args:
        t: `[t, heads, channels]`.
        cu_seqlens: int32 `[sequences + 1]`, where each sequence starts; the last entry is `t`.
        freqs: `[positions, 1, 1, rotated channels]`; as many positions as `t` are those of the row, else of a sequence.
        args: further arguments of the wheel's function.
        cp_group: ranks that share a sequence; where there are several the wheel does it.
        kwargs: as `args`.
    """
    if cp_group is None or cp_group.size() > 1:
        return _one_by_one(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
    if len(freqs) != len(t):
        places = torch.arange(len(t), device=t.device)
        starts = cu_seqlens[:-1].long()
        freqs = freqs[places - starts[torch.searchsorted(cu_seqlens[1:].long(), places, right=True)]]
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, *args, **kwargs).squeeze(1)


def install_packed_rotary() -> None:
    """Have the wheel's attention layers use `apply_packed_rotary`."""
    rope_utils._apply_rotary_pos_emb_thd = apply_packed_rotary
