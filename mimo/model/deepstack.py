"""DeepStack (Meng et al., arXiv:2406.04334): features of several depths of an encoder, added to several decoder layers.

An encoder's output and its levels are the columns of one tensor: the output first, then level 0, level 1, and so on.
They cross the bridge in one message, and each keeps its own gradient. Both in the encoder and in the decoder, the
columns of the levels follow those of the hidden states, so that Megatron Core's pipeline schedules, recomputation and
sequence parallelism carry them like hidden states, without any other state. A decoder layer adds the first level to its
output and drops it. If the layers that add levels are on several pipeline stages, the remaining levels travel to the
next stage with the hidden states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import sharded_state_dict_default


class LayerWithLevels(TransformerLayer):
    """A layer whose input and output may have the columns of levels after those of the hidden states."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the layer on `[s, b, (1 + levels) * hidden]`."""
        size = self.config.hidden_size
        hidden, levels = hidden_states, hidden_states[..., size:]
        if levels.shape[-1]:
            hidden = hidden_states[..., :size].contiguous()
        output, context = super().forward(hidden, *args, **kwargs)
        parts = [part for part in self.combine(output, levels) if part.shape[-1]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), context

    @abstractmethod
    def combine(self, output: torch.Tensor, levels: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of the layer's output, given its hidden states and the levels of its input."""


class DecoderLayer(LayerWithLevels):
    """A decoder layer that adds the first level, if there is one, to its output."""

    def combine(self, output: torch.Tensor, levels: torch.Tensor) -> list[torch.Tensor]:
        if not levels.shape[-1]:
            return [output]
        size = output.shape[-1]
        return [output + levels[..., :size], levels[..., size:]]


class EncoderLayer(LayerWithLevels):
    """An encoder layer whose output becomes a level if its number is in a list.

    Args:
        level_layers: global numbers, from 0, of the layers whose output becomes a level.
        layer: arguments of `TransformerLayer`.
    """

    def __init__(self, *layer: Any, level_layers: Sequence[int], **options: Any) -> None:
        super().__init__(*layer, **options)
        self.is_level = self.layer_number - 1 in level_layers

    def combine(self, output: torch.Tensor, levels: torch.Tensor) -> list[torch.Tensor]:
        return [output, levels, *([output] if self.is_level else [])]


def decoder_with_levels(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return the spec of a decoder with layers that add levels to their outputs."""
    return _with_layers(spec, DecoderLayer)


def encoder_with_levels(spec: TransformerBlockSubmodules, level_layers: Sequence[int]) -> TransformerBlockSubmodules:
    """Return the spec of an encoder in which the outputs of `level_layers` (global numbers, from 0) become levels."""
    return _with_layers(spec, EncoderLayer, level_layers=tuple(level_layers))


def _with_layers(spec: TransformerBlockSubmodules, kind: type, **params: Any) -> TransformerBlockSubmodules:
    layers = spec.layer_specs or []
    assert all(layer.module is TransformerLayer for layer in layers), [layer.module for layer in layers]
    return replace(spec, layer_specs=[replace(layer, module=kind, params={**layer.params, **params})
                                      for layer in layers])


def stage_levels(config: TransformerConfig, num_levels: int, stage: int) -> int:
    """Count the levels that a pipeline stage of the decoder receives with its hidden states.

    Args:
        config: configuration of the decoder.
        num_levels: levels that the encoders send.
        stage: pipeline stage, from 0.
    """
    return max(0, num_levels - get_transformer_layer_offset(config, pp_rank=stage)) if num_levels else 0


class LevelProjectors(MegatronModule):
    """A projector for the encoder's output and one for each level.

    Args:
        config: the projectors' configuration; `hidden_size` is the width of the language model.
        projectors: their specs, that for the output first. All take features of the same width.

    Attributes:
        config: a copy of the configuration whose `hidden_size` is the width of the result.
    """

    def __init__(self, config: TransformerConfig, projectors: Sequence[ModuleSpec]) -> None:
        whole = copy(config)
        whole.hidden_size = config.hidden_size * len(projectors)
        super().__init__(whole)
        self.projectors = torch.nn.ModuleList(build_module(spec) for spec in projectors)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project `[tokens, (1 + levels) * input_size]` to `[tokens, (1 + levels) * hidden_size]`."""
        parts = features.chunk(len(self.projectors), dim=-1)
        return torch.cat([projector(part) for projector, part in zip(self.projectors, parts, strict=True)], dim=-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (),
                           metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the states of the projectors. Megatron Core would treat the modules of a list as replicated."""
        state: dict[str, Any] = {}
        for index, projector in enumerate(self.projectors):
            state |= sharded_state_dict_default(projector, f"{prefix}projectors.{index}.", sharded_offsets, metadata)
        return state
