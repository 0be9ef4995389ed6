"""Megatron Core's Mamba-2 layer without its CUDA kernels.

`MambaMixer` cannot be built without the packages mamba_ssm and causal_conv1d, which are CUDA only. But its module looks
up its kernels when it uses them, so they can be replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from mimo.data.batch import context_positions
from mimo.model import compat
from mimo.model.torch_layers.ssd import split_conv1d_scan, ssd_scan
from mimo.platform import current_platform

logger = logging.getLogger(__name__)


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) over groups of channels, with a gate (mamba_ssm's RMSNormGated).

    `norm(x silu(z)) * weight`, or with `norm_before_gate` `norm(x) * weight * silu(z)`; without `z` just
    `norm(x) * weight`. Computed in float32 (float64 for float64 inputs) and returned in the dtype of `x`.

    Args:
        hidden_size: channels on this tensor-parallel rank.
        eps: added to the mean square.
        group_size: channels normalised together, a divisor of `hidden_size`; None: all.
        norm_before_gate: see above.
        device: device of the weight.
        dtype: dtype of the weight.

    Attributes:
        weight: `[hidden_size]`, ones at first.
        tp_group: group over which the channels are split. `MambaMixer` sets it before `sharded_state_dict` is called.
    """

    tp_group: ProcessGroup

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: torch.device | int | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        assert hidden_size % self.group_size == 0, (hidden_size, group_size)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise `x`, `[..., hidden_size]`, gated by `z` of the same shape; the result has the dtype of `x`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = x.to(dtype)
        gate = None if z is None else F.silu(z.to(dtype))
        if gate is not None and not self.norm_before_gate:
            out = out * gate
        out = F.rms_norm(out.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps).flatten(-2)
        out = out * self.weight.to(dtype)
        if gate is not None and self.norm_before_gate:
            out = out * gate
        return out.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the weight, sharded over the tensor-parallel group; `metadata["dp_cp_group"]` holds its copies."""
        assert metadata is not None, "metadata names the group of the copies, dp_cp_group"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])


def log_mamba_kernels() -> None:
    """Log on the first rank which kernels Mamba-2 layers use, with a warning if a GPU lacks one."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    packages = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if current_platform().name != "cuda":
        logger.info("Mamba-2 layers: scan and convolution run in plain PyTorch, as there are no kernels for the CPU")
    elif missing:
        slow = "the convolution runs" if missing == ["causal_conv1d"] else "scan and convolution run"
        logger.warning("Mamba-2 layers: %s in plain PyTorch, which is slower, as there is no package %s; pip install "
                       "%s", slow, " and ".join(missing), " ".join(packages[name] for name in missing))
    else:
        logger.info("Mamba-2 layers: scan and convolution run in the kernels of mamba_ssm and causal_conv1d")


def use_torch_mamba() -> None:
    """Let Megatron Core's `MambaMixer` train with plain PyTorch in place of kernels, including packed rows.

    On a GPU with mamba_ssm but without causal_conv1d, the scan runs in the kernel and the rest in PyTorch. Call it
    before a mixer is built; further calls change nothing.
    """
    scan: Callable[..., Any] = ssd_scan
    if current_platform().name == "cuda" and importlib.util.find_spec("mamba_ssm") is not None:
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    mamba_mixer.HAVE_MAMBA_SSM = True
    # States are float32 here, so there is no choice of their dtype.
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    mamba_mixer.mamba_split_conv1d_scan_combined = partial(split_conv1d_scan, scan=scan)
    mamba_mixer.mamba_chunk_scan_combined = scan
    mamba_mixer.causal_conv1d_fn = None  # the mixer then calls torch's convolution
    mamba_mixer.ExtendedRMSNorm = GatedRMSNorm
    compat.replace_mamba_packing_check(_packed_rows)


def sort_shared_rows() -> None:
    """Have Megatron Core's `MambaMixer` sort the tokens of context-parallel ranks with plain PyTorch.

    For packed rows, its own functions need a kernel of Transformer Engine.
    """
    compat.replace_mamba_row_order(_in_row_order, _in_rank_order)


def _in_row_order(tokens: Tensor, cp_size: int, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
    """Sort the concatenated tokens of all context-parallel ranks, `[s, b, channels]`, by their position in the row."""
    return tokens.index_select(0, _orders(tokens, cp_size, packed_seq_params)[0])


def _in_rank_order(tokens: Tensor, cp_size: int, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
    """Undo `_in_row_order`."""
    return tokens.index_select(0, _orders(tokens, cp_size, packed_seq_params)[1])


def _orders(tokens: Tensor, cp_size: int, packed: PackedSeqParams | None) -> tuple[Tensor, Tensor]:
    """Return the index of `_in_row_order` and that of its inverse, which are kept with their packed rows."""
    kept: tuple[Tensor, Tensor] | None = None if packed is None else vars(packed).get("_orders")
    if kept is None:
        stops = [len(tokens)] if packed is None else packed.cu_seqlens_q[1:].tolist()
        by_rank = torch.cat([context_positions(stops, cp_size, rank) for rank in range(cp_size)])
        kept = by_rank.argsort().to(tokens.device), by_rank.to(tokens.device)
        if packed is not None:
            packed._orders = kept
    return kept


def _packed_rows(for_inference_not_training: bool = True) -> tuple[bool, str | None]:
    """Return whether rows may be packed, and a reason if not."""
    if for_inference_not_training:
        return False, "packed inference needs the kernels of mamba_ssm and causal_conv1d"
    return True, None
