"""Nemotron-H (arXiv:2504.03624) as a text model: Mamba-2, attention and MoE layers in the order of a pattern.

Sizes come from flags (the defaults are those of NVIDIA-Nemotron-3-Nano-30B-A3B) or from a Hugging Face
`NemotronHConfig` (`--hf-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.observability.flops import FlopComponent
from mimo.protocols import MegatronSource
from providers.common.family import HybridProvider, TextProvider
from providers.common.flops import hybrid_components
from providers.common.hf_nemotron import language_sizes, nemotron_config, nemotron_keys, nemotron_sizes
from providers.common.hybrid import HybridConfig, check_hybrid, check_hybrid_grid, hybrid_shapes, nemotron_source

if TYPE_CHECKING:
    from mimo.weights.rules import WeightMap


@dataclass(frozen=True)
class Config(HybridConfig):
    """Model family: Nemotron-H."""

    hybrid_layer_pattern: str = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    num_query_groups: int = 2
    load_nemotron_checkpoint: str = ""
    """Megatron checkpoint of a whole vision-language model, from whose language model (keys language_model.) the run
    starts: the folder of an iteration, or the folder that holds latest_checkpointed_iteration.txt."""
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


class NemotronHProvider(HybridProvider, TextProvider):
    """The `mimo.protocols.ModelProvider` of Nemotron-H. Every method also takes unresolved configurations."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = ("NemotronHForCausalLM",)
    sizes_of_hf = staticmethod(nemotron_sizes)
    checks = (check_hybrid,)
    check_language_grid = staticmethod(check_hybrid_grid)
    language_shapes = staticmethod(hybrid_shapes)

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        return dataclasses.replace(config, **language_sizes(values))

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return nemotron_keys(values)

    def megatron_source(self, config: Config) -> MegatronSource | None:
        """Return the checkpoint of --load-nemotron-checkpoint, whose language model is loaded."""
        path = config.load_nemotron_checkpoint
        return nemotron_source(path, self.resolved(config)) if path else None

    def flop_components(self, config: Config) -> list[FlopComponent]:
        return hybrid_components(self.resolved(config))

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the names of a `NemotronHForCausalLM` checkpoint.

        The language part of a VLM's checkpoint works too.
        """
        from providers.common.hybrid_weights import text_map

        self.check_module(module)
        return text_map(self.resolved(config))

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the `NemotronHConfig`. Raises ValueError for values that transformers' model cannot have."""
        return nemotron_config(self.resolved(config))


provider = NemotronHProvider()
from_hf = provider.from_hf
