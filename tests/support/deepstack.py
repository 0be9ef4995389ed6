"""The mock model with an encoder that sends the outputs of all of its layers as levels, beside its own output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from providers import mock


class Provider(mock.MockProvider):
    """Mock model whose encoder sends a level for each of its layers; decoder layer i adds level i."""

    def num_levels(self, config: Any, module: str) -> int:
        return int(self.resolved(config).vision_num_layers)

    def language_spec(self, config: Any, context: Any) -> Any:
        from mimo.model.deepstack import decoder_with_levels

        spec = super().language_spec(config, context)
        if context is None:
            return spec
        layers = decoder_with_levels(spec.params["transformer_layer_spec"])
        return replace(spec, params={**spec.params, "transformer_layer_spec": layers})

    def encoder_spec(self, config: Any, module: str, context: Any) -> Any:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from mimo.model.deepstack import LevelProjectors, encoder_with_levels

        spec, levels = super().encoder_spec(config, module, context), range(self.num_levels(config, module))
        ((name, vit),) = spec.submodules["encoders"].items()
        vit = replace(vit, params={**vit.params, "layer_spec": encoder_with_levels(vit.params["layer_spec"], levels)})
        (projector,) = spec.submodules["input_projections"]
        projectors = ModuleSpec(module=LevelProjectors, params={
            "config": projector.params["config"], "projectors": [projector] * (1 + len(levels))})
        return replace(spec, submodules={"encoders": {name: vit}, "input_projections": [projectors]})


provider = Provider()
