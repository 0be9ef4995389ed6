"""DeepSeek-V3 (arXiv:2412.19437): latent attention, a sigmoid router with a bias, groups of experts, shared experts.

A text model. Sizes come from flags (the defaults are the published model's) or from a Hugging Face `DeepseekV3Config`
(`--hf-config`). Multi-token prediction is not built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.observability.flops import FlopComponent
from mimo.protocols import BuildContext
from providers.common.family import TextProvider
from providers.common.flops import latent_components
from providers.common.hf_deepseek import HF_KEYS, deepseek_config, deepseek_sizes
from providers.common.mla import LatentDecoderConfig, check_latent, check_latent_grid, latent_shapes

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap


@dataclass(frozen=True)
class Config(LatentDecoderConfig):
    """Model family: DeepSeek-V3."""

    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


class DeepseekV3Provider(TextProvider):
    """The `mimo.protocols.ModelProvider` of DeepSeek-V3. Every method also takes unresolved configurations."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)
    sizes_of_hf = staticmethod(deepseek_sizes)
    checks = (check_latent,)
    check_language_grid = staticmethod(check_latent_grid)
    language_shapes = staticmethod(latent_shapes)

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        return dataclasses.replace(config, **deepseek_sizes(dict(values)))

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return HF_KEYS

    def flop_components(self, config: Config) -> list[FlopComponent]:
        return latent_components(self.resolved(config))

    def language_spec(self, config: Config, context: BuildContext | None) -> ModuleSpec:
        from providers.common.build import latent_decoder_spec

        return latent_decoder_spec(self.resolved(config), context)

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the rules that map the decoder to `DeepseekV3ForCausalLM`."""
        from providers.common.weights import latent_map

        self.check_module(module)
        return latent_map(self.resolved(config))

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the `DeepseekV3Config`. Raises ValueError for values that transformers' model cannot have."""
        return deepseek_config(self.resolved(config))


provider = DeepseekV3Provider()
from_hf = provider.from_hf
