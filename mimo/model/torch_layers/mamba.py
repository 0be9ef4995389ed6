"""Megatron Core's Mamba-2 layer without its CUDA kernels.

`MambaMixer` cannot be built without the packages mamba_ssm and causal_conv1d, which are CUDA only. But its module looks
up its kernels when it uses them, so they can be replaced by the causal convolution and the selective scan here.

The scan is the chunked algorithm of state space duality (Dao and Gu, arXiv:2405.21060, section 6): inside a chunk a
masked matrix product as in attention, between chunks a recurrence over their states. Arguments are named as in the
paper and in the kernels.

Shapes: `b` rows, `l` tokens, `h` heads, `p` channels of a head, `g` groups of heads that share B and C, `n` state size.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
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
from mimo.platform import current_platform

NO_LIMIT = (0.0, math.inf)

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


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve each channel over a token and those before it in its sequence.

    Args:
        x: `[b, d, l]`.
        weight: `[d, w]`; the last column multiplies the token itself.
        bias: `[d]`.
        seq_idx: `[b, l]` integers; each run of equal ones is a sequence. None: each row is one sequence.
        activation: None, `silu` or `swish` (the same).

    Returns:
        `[b, d, l]` in the dtype of `x`; computed in float32 (float64 for float64 inputs).
    """
    assert activation in (None, "silu", "swish"), activation
    assert x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[1], (x.shape, weight.shape)
    dtype, length = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    runs = None if seq_idx is None else _runs(seq_idx)
    inputs, taps = x.to(dtype), weight.to(dtype).unsqueeze(-1).unbind(1)
    out = inputs * taps[-1]
    for back in range(1, min(len(taps), length)):
        earlier = F.pad(inputs[..., :-back], (back, 0))
        if runs is not None:
            foreign = F.pad(runs[:, back:] != runs[:, :-back], (back, 0))
            earlier = earlier.masked_fill(foreign.unsqueeze(1), 0)
        out = out + earlier * taps[-1 - back]
    if bias is not None:
        out = out + bias.to(dtype).unsqueeze(-1)
    return (F.silu(out) if activation else out).to(x.dtype)


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT, seq_idx: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the recurrence `s_t = exp(dt_t A) s_(t-1) + dt_t x_t B_t^T`, `y_t = s_t C_t` of every head.

    Args:
        x: inputs `[b, l, h, p]`.
        dt: step sizes `[b, l, h]`.
        A: `[h]`, negative.
        B: `[b, l, g, n]`, with which tokens write to the state; head `i` uses group `i // (h / g)`.
        C: `[b, l, g, n]`, with which tokens read from it.
        chunk_size: tokens of a chunk. Memory grows with `l * chunk_size`; the result does not depend on it.
        D: `[h]` or `[h, p]`; adds `D x_t` to the output.
        z: gate `[b, l, h, p]`; multiplies the output by `silu(z)`.
        dt_bias: `[h]`, added to `dt`.
        dt_softplus: whether softplus is applied to `dt`, after the bias.
        dt_limit: least and greatest `dt`, after softplus.
        seq_idx: `[b, l]` integers; no state passes from one run of equal ones to the next. None: each row is one run.
        initial_states: `[b, h, p, n]`, the state before the first token. None: zero.
        return_final_states: whether to return the state after the last token, too.

    Returns:
        The output `[b, l, h, p]` in the dtype of `x`, computed in float32 (float64 for float64 inputs); with
        `return_final_states` also the state `[b, h, p, n]` in the dtype of the computation.
    """
    (rows, length, heads, _), groups = x.shape, B.shape[2]
    assert length > 0 and chunk_size > 0 and heads % groups == 0, (x.shape, B.shape, chunk_size)
    assert dt.shape == (rows, length, heads) and A.shape == (heads,), (x.shape, dt.shape, A.shape)
    assert B.shape == C.shape and B.shape[:2] == (rows, length), (x.shape, B.shape, C.shape)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if initial_states is not None:
        initial_states = initial_states.to(dtype).unflatten(1, (groups, -1))
    with torch.autocast(x.device.type, enabled=False):
        inputs, dt = x.to(dtype), dt.to(dtype)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        if dt_limit != NO_LIMIT:
            dt = dt.clamp(*dt_limit)
        out, states = _scan_chunks(
            (inputs * dt.unsqueeze(-1)).unflatten(2, (groups, -1)), (dt * A.to(dtype)).unflatten(2, (groups, -1)),
            B.to(dtype), C.to(dtype), min(chunk_size, length), seq_idx, initial_states)
        out = out.flatten(2, 3)
        if D is not None:
            out = out + inputs * D.to(dtype).reshape(heads, -1)
        if z is not None:
            out = out * F.silu(z.to(dtype))
    out = out.to(x.dtype)
    return (out, states.flatten(1, 2)) if return_final_states else out


def split_conv1d_scan(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT, return_final_states: bool = False, activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6, outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None, headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
    scan: Callable[..., Any] = ssd_scan,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the part of a Mamba-2 layer between its two projections: convolution, scan and gate.

    The arguments are those of mamba_ssm's `mamba_split_conv1d_scan_combined`. That function can fuse the norm and the
    output projection, which are separate modules here.

    Args:
        zxbcdt: `[b, l, 2 h p + 2 g n + h]`, the parts z, x, B, C and dt, concatenated.
        conv1d_weight: `[h p + 2 g n, w]`, for x, B and C.
        conv1d_bias: `[h p + 2 g n]`.
        dt_bias: `[h]`, added to `dt` before softplus is applied.
        A: `[h]`, negative.
        D: `[h]`, or `[h, p]`.
        chunk_size: tokens of a chunk.
        initial_states: `[b, h, p, n]`; they do not enter the convolution.
        seq_idx: `[b, l]` integers; each run of equal ones is a sequence.
        dt_limit: least and greatest `dt`.
        return_final_states: whether to return the state after the last token, too.
        activation: activation of the convolution.
        rmsnorm_weight: must be None.
        rmsnorm_eps: no effect.
        outproj_weight: must be None.
        outproj_bias: must be None.
        headdim: `p`; needed if `D` is `[h]`.
        ngroups: `g`.
        norm_before_gate: no effect.
        scan: function with the arguments of `ssd_scan`, which runs instead of it.

    Returns:
        `[b, l, h p]` in the dtype of `zxbcdt`, with the final states if they are asked for.
    """
    assert rmsnorm_weight is None and outproj_weight is None and outproj_bias is None
    heads = D.shape[0]
    channels = headdim if D.dim() == 1 else D.shape[1]
    assert channels is not None, "headdim is needed if D has one number for each head"
    inner = heads * channels
    written = (conv1d_weight.shape[0] - inner) // 2
    assert zxbcdt.shape[-1] == 2 * inner + 2 * written + heads, (zxbcdt.shape, inner, written, heads)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * written, heads], dim=-1)
    xbc = causal_conv1d(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation).transpose(1, 2)
    x, B, C = xbc.split([inner, written, written], dim=-1)
    result = scan(
        x.unflatten(-1, (heads, channels)), dt, A, B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1)),
        chunk_size, D=D, z=z.unflatten(-1, (heads, channels)), dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit,
        seq_idx=seq_idx, initial_states=initial_states, return_final_states=return_final_states)
    if isinstance(result, tuple):
        return result[0].flatten(2), result[1]
    return result.flatten(2)


def _runs(seq_idx: Tensor) -> Tensor:
    """Number the runs of equal values in `[b, l]` from 0. An index that comes back later is another run."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0)).cumsum(-1)


def _scan_chunks(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan `x [b, l, g, r, p]`, which is multiplied by dt, with `log_decay [b, l, g, r]` and `r` heads in a group.

    `state [b, g, r, p, n]` is the state before the first token. Returns the output and the last state.
    """
    rows, length, groups, _, channels = x.shape
    # Tokens that fill the last chunk write nothing and keep the state.
    x, log_decay, B, C = (_chunks(part, chunk_size) for part in (x, log_decay, B, C))
    x, B, C = x.movedim(3, 2), B.movedim(3, 2), C.movedim(3, 2)  # [b, c, g, q, ...] from here on
    # Differences of running sums are the logarithms of decays; in float64 they keep the digits of small ones.
    sums = log_decay.permute(0, 1, 3, 4, 2).double().cumsum(-1)  # [b, c, g, r, q]
    same, before, after, through = _connected(seq_idx, rows, length, chunk_size, x.device)
    # Masked before exp, because values above the diagonal would overflow, and their gradients would be nan.
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~same[:, :, None, None], -math.inf)
    within = between.exp().to(x.dtype)  # [b, c, g, r, q (reads), q (wrote)]
    from_start = sums.masked_fill(~before[:, :, None, None], -math.inf).exp().to(x.dtype)
    to_end = (sums[..., -1:] - sums).masked_fill(~after[:, :, None, None], -math.inf).exp().to(x.dtype)
    whole = sums[..., -1].masked_fill(~through[:, :, None, None], -math.inf).exp().to(x.dtype)  # [b, c, g, r]

    scores = C @ B.transpose(-1, -2)  # [b, c, g, q, q]
    out = ((scores.unsqueeze(3) * within) @ x.transpose(3, 4)).transpose(3, 4)  # [b, c, g, q, r, p]
    kept = (x * to_end.transpose(-1, -2).unsqueeze(-1)).flatten(4)  # [b, c, g, q, r p]
    written = (kept.transpose(-1, -2) @ B).unflatten(3, (-1, channels))  # [b, c, g, r, p, n]
    if state is None:
        state = torch.zeros_like(written[:, 0])
    entering = []
    for chunk in range(written.shape[1]):
        entering.append(state)
        state = state * whole[:, chunk, :, :, None, None] + written[:, chunk]
    carried = C @ torch.stack(entering, 1).flatten(3, 4).transpose(-1, -2)  # [b, c, g, q, r p]
    out = out + carried.unflatten(-1, (-1, channels)) * from_start.transpose(-1, -2).unsqueeze(-1)
    return out.movedim(2, 3).flatten(1, 2)[:, :length], state


def _chunks(part: Tensor, chunk_size: int) -> Tensor:
    """Reshape `[b, l, ...]` to `[b, c, chunk_size, ...]`, with zeros after the last token."""
    missing = -part.shape[1] % chunk_size
    if missing:
        part = torch.cat([part, part.new_zeros(part.shape[0], missing, *part.shape[2:])], 1)
    return part.unflatten(1, (-1, chunk_size))


def _connected(
    seq_idx: Tensor | None, rows: int, length: int, chunk_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find which tokens of a chunk belong to the same sequence.

    Returns:
        same: `[b, c, q, q]`, whether the first token reads from the second: same sequence, and not later.
        before: `[b, c, q]`, whether the token belongs to the sequence of the state that enters the chunk.
        after: `[b, c, q]`, whether it belongs to the sequence of the state that leaves the chunk.
        through: `[b, c]`, whether both states belong to the same sequence.
    """
    if seq_idx is None:
        runs = torch.zeros(rows, length, dtype=torch.long, device=device)
    else:
        assert seq_idx.shape == (rows, length), (seq_idx.shape, rows, length)
        runs = _runs(seq_idx)
    last = runs[:, -1:]
    runs = torch.cat([runs, last.expand(-1, -length % chunk_size)], 1).unflatten(1, (-1, chunk_size))
    leaving = runs[:, :, -1]
    entering = F.pad(leaving[:, :-1], (1, 0))  # the first token's run is number 0
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=device).tril()
    same = (runs.unsqueeze(-1) == runs.unsqueeze(-2)) & causal
    return same, runs == entering.unsqueeze(-1), runs == leaving.unsqueeze(-1), leaving == entering
