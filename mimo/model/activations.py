"""Activation functions of vision transformers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """OpenAI CLIP's activation, `x * sigmoid(1.702 x)`.

    Not the wheel's: that one is wrapped in torch.compile, which compiles anew as the number of images changes.
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
