"""Flags of the model that do not depend on its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Model: which family, precision, implementation, what is frozen."""

    model_provider: str = "llava"
    """Model family: a built-in name (docs/providers.md lists them) or pkg.module:attr."""
    bf16: bool = True
    """Parameters and activations in bfloat16 (fp32 master weights); --no-bf16 trains in float32."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation; auto: Transformer Engine on CUDA where it is installed, else local."""
    freeze: str = ""
    """Comma-separated parts that do not train: vision (an encoder's name), projector, language."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the language model."""
    moe_permute_fusion: bool = True
    """Sort tokens by expert and back with Transformer Engine's fused kernels; --no-moe-permute-fusion uses several
    PyTorch kernels, as do --deterministic-mode and local layers."""
    moe_router_fusion: bool = False
    """Choose the experts and compute the load-balancing loss with Transformer Engine's fused kernels, which compute in
    float32 as the unfused code does. Two experts whose scores agree to the last bits of float32 may be ranked
    differently. --deterministic-mode and local layers use several PyTorch kernels all the same."""
    moe_gemm: Literal["auto", "packed", "cutlass", "separate"] = "auto"
    """How Transformer Engine's layers multiply by the weights of a layer's experts. packed: one cuBLASLt product for
    all experts, also for weight gradients (bfloat16, Hopper or newer, cuBLASLt 13.4 or newer); cutlass: one CUTLASS
    kernel where Transformer Engine has one, which leaves out weight gradients; separate: one cuBLAS kernel for each
    expert. auto: packed where it can run, else cutlass; separate with --deterministic-mode. Local layers ignore it."""

    @property
    def frozen(self) -> frozenset[str]:
        """The parts named by --freeze."""
        return frozenset(part.strip() for part in self.freeze.split(",") if part.strip())
