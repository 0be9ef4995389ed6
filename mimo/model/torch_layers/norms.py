"""LayerNorm and RMSNorm in plain PyTorch, with Megatron's builder signature.

Megatron's own fallback without Transformer Engine or Apex refuses sequence parallelism and zero-centered gamma. These
norms support both, on any device.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class _Norm(torch.nn.Module, abc.ABC):
    """Normalisation over the last dimension, times `weight`, plus `bias` if the kind has one.

    The result is computed in float32 (float64 for float64 inputs) and returned in the input's dtype. Parameters have
    the attribute `sequence_parallel`, so that Megatron's `finalize_model_grads` sums their gradients over the
    tensor-parallel group: under sequence parallelism each rank sees only its part of the sequence.

    Args:
        config: gives `params_dtype`, `sequence_parallel`, `layernorm_zero_centered_gamma`.
        hidden_size: size of the last dimension.
        eps: added to the variance (LayerNorm) or the mean square (RMSNorm).
        persist_layer_norm: no effect; it chooses among Apex kernels.
        zero_centered_gamma: whether `weight - 1` is stored, as with the config's `layernorm_zero_centered_gamma`.
        normalization: no effect, because the class decides; `Norm` chooses the class by the config.
        has_residual: whether the caller supports a fused residual addition, which is not available here.

    Raises:
        ValueError: the config asks for the fused residual addition, `fused_residual_rmsnorm`.
    """

    has_bias: ClassVar[bool]

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        has_residual: bool = False,
    ) -> None:
        super().__init__()
        if has_residual and config.fused_residual_rmsnorm:
            raise ValueError(
                "fused_residual_rmsnorm needs Transformer Engine: use --transformer-impl "
                "transformer_engine or leave it off"
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma or config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if self.has_bias:
            self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1 and the shift to 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape `[..., hidden_size]`. The result has the same shape and dtype."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype)
        if self.zero_centered_gamma:
            weight = weight + 1
        return self.normalize(x.to(dtype), weight).to(x.dtype)

    @abc.abstractmethod
    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the formula in the dtype of the arguments; `weight` is the true scale."""

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, biased variance (Ba et al., arXiv:1607.06450)."""

    has_bias = True

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self.bias is not None
        return F.layer_norm(x, (self.hidden_size,), weight, self.bias.to(x.dtype), self.eps)


class RMSNorm(_Norm):
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, arXiv:1910.07467)."""

    has_bias = False

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)


class Norm:
    """Builds the norm that `config.normalization` names; use it where a Megatron spec wants a norm class."""

    def __new__(  # type: ignore[misc]  # builds another class's instance, as Megatron's own norm factories do
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **extras: Any
    ) -> _Norm:
        """Build the norm. Raises ValueError for a kind other than LayerNorm and RMSNorm."""
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(f"normalization {config.normalization!r} is not one of {', '.join(kinds)}")
        return kinds[config.normalization](config, hidden_size, eps, **extras)
