"""Kernels within layers: activations by name, norms, rotary positions, and what Transformer Engine adds up itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELayerNormColumnParallelLinear
from megatron.core.transformer import attention

from mimo.model import compat

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """OpenAI CLIP's activation, `x * sigmoid(1.702 x)`.

    Not Megatron Core's: that one is wrapped in torch.compile, which compiles anew as the number of images changes.
    """
    return x * torch.sigmoid(1.702 * x)


class _QuickGelu(torch.autograd.Function):
    """`quick_gelu` by Transformer Engine: one kernel a pass instead of three and five, one saved tensor of three."""

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
    """GELU's tanh approximation (Hugging Face `gelu_pytorch_tanh`)."""
    return torch.nn.functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": quick_gelu, "gelu": torch.nn.functional.gelu, "gelu_tanh": gelu_tanh}


def activation(name: str, impl: str) -> Activation:
    """An activation function.

    Args:
        name: `quick_gelu`, `gelu` or `gelu_tanh`.
        impl: `local` or `transformer_engine`.
    """
    if name == "quick_gelu" and impl == "transformer_engine":
        return fused_quick_gelu
    return _ACTIVATIONS[name]


# Weight gradients that Transformer Engine's matrix products add to the buffer of gradients themselves.


class _RmsNorm(torch.autograd.Function):
    """Root mean square norm by Transformer Engine's kernels."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, norm: Any, trains: bool) -> torch.Tensor:
        """Normalize `[..., hidden]` by the settings of `norm`, Transformer Engine's layer; in the weight's dtype."""
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

    The fuser is built anew for each call, plans which operations to fuse, and finds one. A decoder layer with norms of
    queries and keys goes through it six times in a microbatch, for which the GPU waits where kernels are short. The
    kernels and their results are the same.
    """
    import transformer_engine.pytorch as te

    part: Any
    for part in module.modules():
        if type(part) is te.RMSNorm and part.weight.dim() == 1:
            part.forward = partial(_call_norm, part)


def _call_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RmsNorm.apply(hidden, norm.weight, norm, torch.is_grad_enabled())
    return result


def accumulate_into_main_grad(module: torch.nn.Module) -> None:
    """Have the layers of a wrapped module add weight gradients to `main_grad` inside the matrix product.

    Megatron Core's flag for this, `gradient_accumulation_fusion`, asks for a kernel of apex too, for the output layer;
    and it makes layers without a buffer of gradients fail in their backward pass. Here it is a matter of the layers
    that have both. Without it every microbatch writes its gradients once in the parameters' precision, to be read and
    added.

    Args:
        module: a module in `DistributedDataParallel`, whose trainable parameters have `main_grad`; in place.
    """
    layer: Any
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True
            # Else the first pass of all would overwrite the buffer, and an encoder may have several before its first
            # backward one. `mimo.model.fp8` keeps copies of weights in FP8 in another way.
            layer.disable_parameter_transpose_cache = True


# Rotary positions of packed rows in one go.
#
# Megatron Core's PyTorch path applies them sequence by sequence and asks the device where each begins: hundreds of
# completions of a few tokens each then take seconds of launches in every pass.


def apply_packed_rotary(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any,
                        cp_group: Any = None, **kwargs: Any) -> torch.Tensor:
    """Rotary positions of a packed row; as Megatron Core's function for `thd`, bit for bit, without waiting for the
    device.

    Args:
        t: `[t, heads, channels]`.
        cu_seqlens: int32 `[sequences + 1]`, where each sequence starts; the last entry is `t`.
        freqs: `[positions, 1, 1, rotated channels]`; as many positions as `t` are those of the row, else of a sequence.
        args: further arguments of Megatron Core's function.
        cp_group: ranks that share the sequences; `t` has the tokens of one of them (`mimo.data.context`).
        kwargs: as `args`.
    """
    if cp_group is None:
        return compat.rotary_of_packed_rows(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
    if cp_group.size() > 1 and len(freqs) != len(t):
        freqs = freqs[_shared_positions(cu_seqlens.long(), len(t), cp_group.size(), cp_group.rank())]
    elif len(freqs) != len(t):
        places = torch.arange(len(t), device=t.device)
        starts = cu_seqlens[:-1].long()
        freqs = freqs[places - starts[torch.searchsorted(cu_seqlens[1:].long(), places, right=True)]]
    return compat.rotary_of_rows(t.unsqueeze(1), freqs, *args, **kwargs).squeeze(1)


def _shared_positions(cu_seqlens: torch.Tensor, length: int, cp: int, rank: int) -> torch.Tensor:
    """Return the position in its sequence of each token of a context-parallel rank, int64 `[length]`.

    As `mimo.data.context.positions`, less the starts of the sequences, without waiting for the device.
    """
    places = torch.arange(length, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens[1:] // cp, places, right=True)
    lengths = cu_seqlens.diff()[number]
    offset, chunk = places - cu_seqlens[:-1][number] // cp, lengths // (2 * cp)
    return torch.where(offset < chunk, offset + rank * chunk, offset - chunk + lengths - (rank + 1) * chunk)


def install_packed_rotary() -> None:
    """Have Megatron Core's attention layers use `apply_packed_rotary`."""
    compat.replace_rotary_of_packed_rows(apply_packed_rotary)


# Queries, keys and values of one matrix product, whose gradients need not be copied together again.


def install_split() -> None:
    """Have Megatron Core's attention layers split by Transformer Engine's function, where it is installed.

    Gradients of a split that already lie in one tensor, as cuDNN's attention leaves them, are that tensor. Megatron
    Core looks for the function under a name that Transformer Engine has given up, and then takes `torch.split`.
    """
    if attention.SplitAlongDim is not None:
        return
    try:
        from transformer_engine.pytorch.utils import SplitAlongDim
    except ImportError:
        return
    attention.SplitAlongDim = SplitAlongDim.apply


# Linear layers of Transformer Engine for MLPs whose activation does not add the bias. Imports Transformer Engine.


class ColumnParallelWithBias(TEColumnParallelLinear):
    """A column-parallel linear layer that adds its bias inside the matrix product.

    Megatron Core's MLP asks its first layer for the bias instead, to be added together with the activation; for
    activations that it has no such kernel of it then adds it by itself, which reads and writes the widest tensor of all
    once more.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)


class LayerNormColumnParallelWithBias(TELayerNormColumnParallelLinear):
    """A norm and a `ColumnParallelWithBias`, in one layer."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)
