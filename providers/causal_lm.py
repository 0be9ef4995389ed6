"""Text models without an encoder: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral.

Sizes come from flags (the defaults are those of Llama 2 7B) or from a Hugging Face configuration (`--hf-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.observability.flops import FlopComponent
from providers.common import hf, hf_text
from providers.common.decoder import DecoderConfig, check_decoder, check_decoder_grid, decoder_shapes
from providers.common.family import DecoderProvider, TextProvider
from providers.common.flops import decoder_components

if TYPE_CHECKING:
    from mimo.weights.rules import WeightMap


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Model family: a text model."""

    vocab_size: int = 32000
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


class CausalLmProvider(DecoderProvider, TextProvider):
    """The `mimo.protocols.ModelProvider` of text models. Every method also takes unresolved configurations."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = (*hf_text.ARCHITECTURES.values(), "MistralForCausalLM")
    sizes_of_hf = staticmethod(hf.causal_lm_sizes)
    checks = (check_decoder,)
    check_language_grid = staticmethod(check_decoder_grid)
    language_shapes = staticmethod(decoder_shapes)

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        return dataclasses.replace(config, **hf.module_sizes(values, module))

    def flop_components(self, config: Config) -> list[FlopComponent]:
        return decoder_components(self.resolved(config))

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the names of a text model's checkpoint. The language part of a LLaVA checkpoint works too."""
        from providers.common import weights

        self.check_module(module)
        found = weights.decoder_map(self.resolved(config), (weights.CAUSAL_LM, *weights.LLAVA_LANGUAGE))
        return dataclasses.replace(found, ignored=(*found.ignored, weights.LLAVA_VISION_TENSORS))

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the model as a config.json. Raises ValueError if no Hugging Face family has all its parts."""
        return hf_text.causal_lm_config(self.resolved(config))


provider = CausalLmProvider()
from_hf = provider.from_hf
