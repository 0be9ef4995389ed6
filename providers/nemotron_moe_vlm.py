"""Nemotron MoE VLM: a RADIO encoder, a projector, a decoder of Mamba-2, attention and MoE layers.

Variants: `nemotron-moe-vlm-20l`, `nemotron-moe-vlm-54l` and, of the same shape for CPUs, `nemotron-moe-vlm-tiny`. Sizes
come from flags or from a Hugging Face `NemotronH_Nano_VL_V2` configuration (`--hf-config`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mimo.grid.spec import Layout
from mimo.observability.flops import FlopComponent
from mimo.protocols import LANGUAGE, BuildContext, ImageProcessing, MegatronSource, ParameterShape
from providers import radio
from providers.common import hf
from providers.common.family import VISION, HybridProvider, VisionLanguageProvider
from providers.common.flops import hybrid_components, projector_components, vision_components
from providers.common.hf_nemotron import VLM_TYPES, encoder_sizes, language_sizes, nemotron_keys, vlm_config, vlm_sizes
from providers.common.hf_radio import (
    check_radio_processor,
    radio_processing,
    with_radio_processing,
    write_radio_processor,
)
from providers.common.hybrid import HybridConfig, check_hybrid, check_hybrid_grid, hybrid_shapes, nemotron_source
from providers.common.vision import image_tokens

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap

ENCODER = "radio"
# Parts that do not train, by --training-stage.
STAGES = {"": frozenset[str](), "stage1": frozenset({VISION, LANGUAGE}), "stage2": frozenset[str]()}
PATTERN_20 = "MEMEM*EMEMEM*EMEMEM*"
# Half of the layers have experts. The order of layers in the published checkpoint is not public.
PATTERN_54 = "MEMEME*E" * 6 + "MEMEME"


@dataclass(frozen=True)
class Config(radio.RadioConfig, HybridConfig):
    """Model family: Nemotron MoE VLM with 20 decoder layers."""

    hybrid_layer_pattern: str = PATTERN_20
    vision_dynamic_resolution: bool = True
    image_token_id: int = 131071
    """Token id that stands for an image."""
    training_stage: Literal["", "stage1", "stage2"] = ""
    """stage1: only the projector trains. stage2: everything trains except what --freeze names, as without a stage."""
    load_nemotron_checkpoint: str = ""
    """Megatron checkpoint of the whole model (keys vision_model., vision_projection., language_model.) from whose
    weights the run starts: the folder of an iteration, or the folder that holds latest_checkpointed_iteration.txt."""
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


@dataclass(frozen=True)
class Config54(Config):
    """Model family: Nemotron MoE VLM with 54 decoder layers."""

    hybrid_layer_pattern: str = PATTERN_54


@dataclass(frozen=True)
class ConfigTiny(Config):
    """Model family: Nemotron MoE VLM, small enough for CPUs."""

    hybrid_layer_pattern: str = "MEM*-E"
    hidden_size: int = 64
    num_attention_heads: int = 8
    num_query_groups: int = 2
    kv_channels: int = 16
    ffn_hidden_size: int = 128
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    mamba_num_heads: int = 8
    mamba_head_dim: int = 16
    mamba_num_groups: int = 2
    mamba_state_dim: int = 16
    num_experts: int = 8
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 32
    moe_shared_expert_intermediate_size: int = 64
    vision_image_size: int = 32
    vision_patch_size: int = 8
    vision_hidden_size: int = 64
    vision_num_layers: int = 2
    vision_num_attention_heads: int = 4
    vision_ffn_hidden_size: int = 128
    vision_class_token_len: int = 2
    vision_max_image_size: int = 256
    projector_hidden_size: int = 128
    image_token_id: int = 511


class NemotronVlmProvider(HybridProvider, VisionLanguageProvider):
    """The `mimo.protocols.ModelProvider` of one variant. Every method also takes unresolved configurations.

    Args:
        config: its flags, with the variant's sizes as defaults.
        architectures: Hugging Face classes that this variant loads.
    """

    checks = (check_hybrid, radio.check_radio)
    check_language_grid = staticmethod(check_hybrid_grid)
    check_encoder_grid = staticmethod(radio.check_radio_grid)
    image_tokens = staticmethod(image_tokens)
    language_shapes = staticmethod(hybrid_shapes)
    sizes_of_hf = staticmethod(vlm_sizes)

    def __init__(self, config: type[Config], architectures: tuple[str, ...] = ()) -> None:
        self.Config = config
        self.hf_architectures = architectures

    def vision_shapes(self, config: Config) -> list[ParameterShape]:
        return radio.radio_shapes(config, config.hidden_size)

    def validate(self, config: Config, layout: Layout, seq_length: int) -> None:
        """Check what every family checks, and that random crops do not depend on the layout."""
        super().validate(config, layout, seq_length)
        if config.vision_cpe_augmentation and layout.encoder_window is not None:
            raise ValueError("--vision-cpe-augmentation with encoder windows (--encoder-window): the random crop of an "
                             "image would depend on the rank that encodes it; leave one of them out")

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        if module != LANGUAGE:
            return dataclasses.replace(config, **encoder_sizes(values))
        # A text model alone does not say which of its tokens stands for an image.
        token = values.get("img_context_token_id", config.image_token_id)
        return dataclasses.replace(config, **language_sizes(values), image_token_id=token)

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return nemotron_keys(values)

    def frozen_parts(self, config: Config) -> frozenset[str]:
        return STAGES[config.training_stage]

    def megatron_source(self, config: Config) -> MegatronSource | None:
        path = config.load_nemotron_checkpoint
        vision = {VISION: {f"encoders.{ENCODER}.": "vision_model.",
                           "input_projections.0.": "vision_projection.encoder."}}
        return nemotron_source(path, self.resolved(config), vision) if path else None

    def flop_components(self, config: Config) -> list[FlopComponent]:
        config = self.resolved(config)
        return [*vision_components(config, num_extra=config.vision_class_token_len, parallel_patches=True),
                *projector_components(config.feature_size, config.projector_hidden_size, config.hidden_size,
                                      has_norm=True),
                *hybrid_components(config)]

    def encoder_spec(self, config: Config, module: str, context: BuildContext) -> ModuleSpec:
        from providers.common.build import radio_spec

        self.check_module(module)
        config = self.resolved(config)
        return radio_spec(config, ENCODER, config.hidden_size, context)

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the names of a `NemotronH_Nano_VL_V2` checkpoint. For one module, its own checkpoint works too."""
        from providers.common.hybrid_weights import language_map
        from providers.common.weights import radio_map

        config = self.resolved(config)
        if module == LANGUAGE:
            return language_map(config)
        self.check_module(module)
        return radio_map(config, ENCODER)

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the model as a `NemotronH_Nano_VL_V2` configuration. Raises ValueError if none has all its parts."""
        return vlm_config(self.resolved(config))

    def image_processing(self, config: Config, folder: str = "") -> ImageProcessing | None:
        """Return how vLLM's processor of the family makes pixels. It reads only config.json."""
        config = self.resolved(config)
        if not folder:
            return radio_processing({}, config, type(self).__name__)
        path = hf.config_path(folder)
        values = hf.load(path) if path.is_file() else {}
        return radio_processing(values, config, str(path)) if values.get("model_type") in VLM_TYPES else None

    def write_image_processing(self, config: Config, folder: Path, processing: ImageProcessing) -> str:
        """Write the processing of training to config.json, or return the reason why vLLM's processor cannot do it."""
        path = hf.config_path(folder)
        values, note = with_radio_processing(hf.load(path), self.resolved(config), processing)
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return note

    def check_processor(self, config: Config) -> None:
        """Raise ValueError, with flags and values, if vLLM's processor or encoder would compute something else."""
        check_radio_processor(self.resolved(config))

    def write_processor(self, config: Config, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        config = self.resolved(config)
        write_radio_processor(config, config.image_token_id, config.vocab_size, folder, mean, std)


provider_20l = NemotronVlmProvider(Config, VLM_TYPES)
provider_54l = NemotronVlmProvider(Config54)
provider_tiny = NemotronVlmProvider(ConfigTiny)
