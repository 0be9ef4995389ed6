"""Flags of the model that do not depend on its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Model: which family, precision, implementation, what is frozen."""

    model_provider: str = "llava"
    """Model family: a built-in name (README.md lists them) or pkg.module:attr."""
    bf16: bool = True
    """Parameters and activations in bfloat16 (fp32 master weights); --no-bf16 trains in float32."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation; auto: Transformer Engine on CUDA where it is installed, else local."""
    freeze: str = ""
    """Comma-separated parts that do not train: vision (an encoder's name), projector, language."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the language model."""

    @property
    def frozen(self) -> frozenset[str]:
        """The parts named by --freeze."""
        return frozenset(part.strip() for part in self.freeze.split(",") if part.strip())
