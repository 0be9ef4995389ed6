"""DeepSeek-V3 in vLLM with the trainer's norms of latents. Imports vLLM.

The norms on compressed queries and keys have an epsilon of 1e-6 in transformers and in the trainer, whatever
`rms_norm_eps` is. vLLM's `DeepseekV2MLAAttention` gives them `rms_norm_eps`, which is 1e-5 in Moonlight, for example.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
LATENT_NORM_EPSILON = 1e-6


class DeepseekV3(DeepseekV3ForCausalLM):
    """vLLM's model with the epsilon that the docstring of this module names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, norm in self.named_modules():
            if name.rpartition(".")[2] in LATENT_NORMS:
                norm.variance_epsilon = LATENT_NORM_EPSILON
