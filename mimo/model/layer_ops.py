"""Kernels within layers: activations by name, norms, weight gradients, rotary positions, and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.transformer import attention

from mimo.model import compat

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """OpenAI CLIP's activation, `x * sigmoid(1.702 x)`.

    Megatron Core's own function is wrapped in torch.compile, which compiles again whenever the number of images
    changes.
    """
    return x * torch.sigmoid(1.702 * x)


class _QuickGelu(torch.autograd.Function):
    """`quick_gelu` by Transformer Engine's kernels.

    It launches one kernel in each pass instead of three and five, and saves one tensor instead of three.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine_torch as kernels

        x = x.contiguous()
        ctx.save_for_backward(x)
        return kernels.qgelu(x, None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        import transformer_engine_torch as kernels

        (x,) = ctx.saved_tensors
        return kernels.dqgelu(grads[0].contiguous(), x, None)


def fused_quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """`quick_gelu` of a tensor on a GPU, by Transformer Engine."""
    return _QuickGelu.apply(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh approximation (Hugging Face `gelu_pytorch_tanh`)."""
    return torch.nn.functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": quick_gelu, "gelu": torch.nn.functional.gelu, "gelu_tanh": gelu_tanh}


def activation(name: str, impl: str) -> Activation:
    """Return an activation function.

    Args:
        name: `quick_gelu`, `gelu` or `gelu_tanh`.
        impl: `local` or `transformer_engine`.
    """
    if name == "quick_gelu" and impl == "transformer_engine":
        return fused_quick_gelu
    return _ACTIVATIONS[name]


class _RmsNorm(torch.autograd.Function):
    """Root mean square norm by Transformer Engine's kernels."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, norm: Any, trains: bool) -> torch.Tensor:
        """Normalize `[..., hidden]` in the weight's dtype, with the settings of `norm`, Transformer Engine's layer."""
        import transformer_engine_torch as kernels
        from transformer_engine.pytorch.constants import TE_DType

        rows = hidden.to(weight.dtype).contiguous().view(-1, weight.numel())
        margins = compat.margins_of_norm(norm)
        out, _, inverse_rms = kernels.rmsnorm_fwd(rows, weight, norm.eps, None, None, TE_DType[weight.dtype],
                                                  margins["forward" if trains else "inference"],
                                                  norm.zero_centered_gamma)
        ctx.save_for_backward(rows, inverse_rms, weight)
        ctx.margin, ctx.zero_centered, ctx.dtype = margins["backward"], norm.zero_centered_gamma, hidden.dtype
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        import transformer_engine_torch as kernels

        rows, inverse_rms, weight = ctx.saved_tensors
        (grad,) = grads
        of_rows, of_weight = kernels.rmsnorm_bwd(grad.to(rows.dtype).contiguous().view(rows.shape), rows, inverse_rms,
                                                 weight, ctx.margin, ctx.zero_centered)
        return of_rows.view(grad.shape).to(ctx.dtype), of_weight.view(weight.shape), None, None


def call_norm_kernels(module: torch.nn.Module) -> None:
    """Have Transformer Engine's RMS norms of a module call their kernels without the operation fuser around them.

    Each call builds a new fuser, which plans which operations to fuse and finds only one. A decoder layer with norms of
    queries and keys goes through it six times in a microbatch, and the GPU waits for it if its kernels are short. The
    kernels and their results stay the same.
    """
    import transformer_engine.pytorch as te

    def call(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _RmsNorm.apply(hidden, norm.weight, norm, torch.is_grad_enabled())
        return result

    part: Any
    for part in module.modules():
        if type(part) is te.RMSNorm and part.weight.dim() == 1:
            part.forward = partial(call, part)


def skip_dropout_generators(module: torch.nn.Module) -> None:
    """Have Transformer Engine's attention without dropout leave random generators alone.

    Without sequence parallelism, it switches to the generator of the tensor-parallel rank and back in every forward
    pass, although nothing is drawn. No CUDA graph may contain that.
    """
    part: Any
    for part in module.modules():
        if hasattr(part, "attention_dropout_ctx"):
            dropout = part.attention_dropout
            if not (dropout.p if isinstance(dropout, torch.nn.Dropout) else dropout):
                part.attention_dropout_ctx = nullcontext


def accumulate_into_main_grad(module: torch.nn.Module) -> None:
    """Have the layers of a wrapped module add weight gradients to `main_grad` inside the matrix product.

    Otherwise every microbatch writes its gradients in the parameters' precision, to be read and added afterwards.
    Megatron Core's flag for this, `gradient_accumulation_fusion`, makes layers without a gradient buffer fail in their
    backward pass. Here, only layers of Transformer Engine are changed; `mimo.model.vocabulary` has the embedding and
    the output layer.

    Args:
        module: a module in `DistributedDataParallel`, whose trainable parameters have `main_grad`; changed in place.
    """
    layer: Any
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True
            # Otherwise Transformer Engine would overwrite the buffer after the first forward pass, and an encoder may
            # have several before its first backward pass. `mimo.model.fp8` keeps FP8 copies of weights differently.
            layer.disable_parameter_transpose_cache = True


def apply_packed_rotary(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any,
                        cp_group: Any = None, **kwargs: Any) -> torch.Tensor:
    """Apply rotary positions to a packed row all at once with `apply_rotary`.

    On a CPU, it has the same bits as Megatron Core's function for `thd`. Megatron Core's PyTorch path goes sequence by
    sequence and asks the device where each begins. With hundreds of completions of a few tokens each, every pass then
    takes seconds of launches.

    Args:
        t: `[t, heads, channels]`.
        cu_seqlens: int32 `[sequences + 1]`, the start of each sequence; the last entry is `t`.
        freqs: `[positions, 1, 1, rotated channels]`. `t` positions are those of the row, any other number those of a
            sequence.
        args: further arguments of Megatron Core's function.
        cp_group: ranks that share the sequences; `t` has the tokens of one of them, see
            `mimo.data.batch.context_positions`.
        kwargs: further keyword arguments of Megatron Core's function.
    """
    if cp_group is None:
        return compat.rotary_of_packed_rows(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
    if cp_group.size() > 1 and len(freqs) != len(t):
        freqs = freqs[_shared_positions(cu_seqlens.long(), len(t), cp_group.size(), cp_group.rank())]
    elif len(freqs) != len(t):
        tokens = torch.arange(len(t), device=t.device)
        starts = cu_seqlens[:-1].long()
        freqs = freqs[tokens - starts[torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)]]
    return apply_rotary(t.unsqueeze(1), freqs, *args, **kwargs).squeeze(1)


def _shared_positions(cu_seqlens: torch.Tensor, length: int, cp: int, rank: int) -> torch.Tensor:
    """Return the position in its sequence of each token of a context-parallel rank, int64 `[length]`.

    This is `mimo.data.batch.context_positions` minus the starts of the sequences, without waiting for the device.
    """
    tokens = torch.arange(length, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens[1:] // cp, tokens, right=True)
    lengths = cu_seqlens.diff()[number]
    offset, chunk = tokens - cu_seqlens[:-1][number] // cp, lengths // (2 * cp)
    return torch.where(offset < chunk, offset + rank * chunk, offset - chunk + lengths - (rank + 1) * chunk)


class _Rotary(torch.autograd.Function):
    """Rotates pairs of channels by angles, with the same bits as Megatron Core's PyTorch path.

    It saves the angles, which are one tensor for all layers unless `apply_packed_rotary` picks those of its tokens.
    Otherwise, each layer would save their cosines and sines, once for the queries and once for the keys, and tensor
    parallelism does not divide these.
    """

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, freqs: torch.Tensor, interleaved: bool, mscale: float) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        ctx.interleaved, ctx.mscale = interleaved, mscale
        cos, sin = _cos_sin(freqs, mscale, t.dtype)
        return (t * cos).add_(compat.rotate_half(t, interleaved).mul_(sin))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (freqs,) = ctx.saved_tensors
        cos, sin = _cos_sin(freqs, ctx.mscale, gradient.dtype)
        # The transpose of a quarter turn is a turn the other way.
        return (gradient * cos).sub_(compat.rotate_half(gradient * sin, ctx.interleaved)), None, None, None


def _cos_sin(freqs: torch.Tensor, mscale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    found = freqs.cos(), freqs.sin()
    if mscale != 1.0:
        found = found[0] * mscale, found[1] * mscale
    return found[0].to(dtype), found[1].to(dtype)


def apply_rotary(t: torch.Tensor, freqs: torch.Tensor, rotary_interleaved: bool = False,
                 mla_rotary_interleaved: bool = False, mscale: float = 1.0) -> torch.Tensor:
    """Apply rotary positions to plain rows, and keep only the angles for the gradient.

    A GPU with Transformer Engine runs one kernel, which does not round cosines and sines to the type of `t`. Megatron
    Core does not use that kernel for positions of three axes, and launches about ten kernels instead. Elsewhere the
    result has the bits of Megatron Core's PyTorch path.

    Args:
        t: `[s, b, heads, channels]`.
        freqs: angles `[s, b or 1, 1, rotated channels]`, of the first channels.
        rotary_interleaved: whether pairs are neighbours. Otherwise, they are half of the rotated channels apart.
        mla_rotary_interleaved: whether neighbours are first moved apart, as in latent attention.
        mscale: factor of cosines and sines.
    """
    fused = compat.fused_rotary
    if t.is_cuda and fused is not None and mscale == 1.0 and not mla_rotary_interleaved:
        # To the kernel, rows with positions of their own are one row after the other.
        own = freqs.shape[1] > 1
        one = (t.flatten(0, 1)[:, None], freqs.flatten(0, 1)[:, None]) if own else (t, freqs)
        found: torch.Tensor = fused(one[0], one[1].contiguous(), interleaved=rotary_interleaved)
        return found.view(t.shape)
    t, rest = t.split((freqs.shape[-1], t.shape[-1] - freqs.shape[-1]), dim=-1)
    if mla_rotary_interleaved:
        t = torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)
    rotated: torch.Tensor = _Rotary.apply(t, freqs, rotary_interleaved, mscale)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def install_rotary() -> None:
    """Have Megatron Core's attention layers use `apply_packed_rotary` and `apply_rotary`."""
    compat.replace_rotary(apply_packed_rotary, apply_rotary)


def install_split() -> None:
    """Have Megatron Core's attention layers split queries, keys and values by Transformer Engine's function.

    Its backward pass does not copy gradients that already lie in one tensor, as cuDNN's attention leaves them. Megatron
    Core looks for the function under a name that Transformer Engine has given up, and then uses `torch.split`. Does
    nothing if Transformer Engine is not installed.
    """
    if attention.SplitAlongDim is not None:
        return
    try:
        from transformer_engine.pytorch.utils import SplitAlongDim
    except ImportError:
        return
    attention.SplitAlongDim = SplitAlongDim.apply


class ColumnParallelWithBias(TEColumnParallelLinear):
    """A column-parallel linear layer of Transformer Engine that adds its bias inside the matrix product.

    Megatron Core's MLP asks its first layer for the bias instead, to add it together with the activation. For
    activations without such a kernel it adds the bias separately, which reads and writes the widest tensor of all once
    more.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)


class LayerNormColumnParallelWithBias(TELayerNormColumnParallelLinear):
    """A norm and a `ColumnParallelWithBias`, in one layer."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)


class RowParallelWithBias(TERowParallelLinear):
    """A row-parallel linear layer of Transformer Engine that adds its bias inside the matrix product.

    Megatron Core's layers ask for the bias instead, to add it together with the residual. The gradient of the bias is
    then a pass of its own.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)
