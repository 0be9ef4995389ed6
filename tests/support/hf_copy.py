"""Copies the weights of a Hugging Face Llava model into the unsplit Megatron modules of the `llava` provider."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from providers.llava import Config


def copy_llava(hf_model: Any, vision: torch.nn.Module, language: torch.nn.Module, config: Config) -> None:
    """Copy every parameter; fails on a parameter that is left over or has another shape.

    Args:
        hf_model: a `LlavaForConditionalGeneration`.
        vision: the `VisionSubmodule`, unsplit.
        language: the `GPTModel`, unsplit.
        config: its configuration.
    """
    source = hf_model.model
    _load(vision, _vision_weights(source.vision_tower, source.multi_modal_projector, config))
    weights = _decoder_weights(source.language_model, config)
    if config.untie_embeddings_and_output_weights:
        weights["output_layer.weight"] = hf_model.lm_head.weight
    _load(language, weights)


def _load(module: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    assert set(parameters) == set(weights), set(parameters) ^ set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == weights[name].shape, (name, parameter.shape, weights[name].shape)
            parameter.copy_(weights[name])


def fuse_qkv(query: Tensor, key: Tensor, value: Tensor, num_groups: int) -> Tensor:
    """Query, key and value rows interleaved by query group: the queries of group 0, its key, its value, group 1, ..."""
    parts = [part.reshape(num_groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _attention(attention: Any, output: Any, num_groups: int, prefix: str, bias: bool) -> dict[str, Tensor]:
    names = {"weight": True, "bias": bias}
    weights = {
        f"{prefix}.linear_qkv.{kind}": fuse_qkv(
            *(getattr(getattr(attention, part), kind) for part in ("q_proj", "k_proj", "v_proj")), num_groups
        )
        for kind, wanted in names.items()
        if wanted
    }
    return weights | {f"{prefix}.linear_proj.weight": output.weight}


def _module(source: Any, target: str) -> dict[str, Tensor]:
    return {f"{target}.{name}": parameter for name, parameter in source.named_parameters()}


def _vision_weights(tower: Any, projector: Any, config: Config) -> dict[str, Tensor]:
    tower = getattr(tower, "vision_model", tower)
    weights = _module(tower.embeddings.patch_embedding, "conv1")
    weights |= _module(tower.embeddings.position_embedding, "position_embeddings")
    if config.vision_class_token:
        weights["class_token"] = tower.embeddings.class_embedding[None, None]
    if config.vision_pre_layernorm:
        weights |= _module(tower.pre_layrnorm, "ln_pre")
    for index, layer in enumerate(list(tower.encoder.layers)[: config.vision_num_layers]):
        prefix = f"decoder.layers.{index}"
        attention = layer.self_attn
        weights |= _attention(
            attention, attention.out_proj, config.vision_num_attention_heads, f"{prefix}.self_attention", bias=True
        )
        weights[f"{prefix}.self_attention.linear_proj.bias"] = attention.out_proj.bias
        weights |= _module(layer.layer_norm1, f"{prefix}.input_layernorm")
        weights |= _module(layer.layer_norm2, f"{prefix}.pre_mlp_layernorm")
        weights |= _module(layer.mlp.fc1, f"{prefix}.mlp.linear_fc1") | _module(
            layer.mlp.fc2, f"{prefix}.mlp.linear_fc2"
        )
    weights = {f"encoders.vit.{name}": weight for name, weight in weights.items()}
    for index, linear in enumerate((projector.linear_1, projector.linear_2), start=1):
        weights |= _module(linear, f"input_projections.0.linear_fc{index}")
    return weights


def _decoder_weights(model: Any, config: Config) -> dict[str, Tensor]:
    weights = _module(model.embed_tokens, "embedding.word_embeddings") | _module(model.norm, "decoder.final_layernorm")
    for index, layer in enumerate(model.layers):
        prefix = f"decoder.layers.{index}"
        attention = layer.self_attn
        weights |= _attention(
            attention, attention.o_proj, config.query_groups, f"{prefix}.self_attention", config.add_qkv_bias
        )
        if config.qk_layernorm:
            weights |= _module(attention.q_norm, f"{prefix}.self_attention.q_layernorm")
            weights |= _module(attention.k_norm, f"{prefix}.self_attention.k_layernorm")
        weights |= _module(layer.input_layernorm, f"{prefix}.input_layernorm")
        weights |= _module(layer.post_attention_layernorm, f"{prefix}.pre_mlp_layernorm")
        if config.num_experts:
            weights |= _expert_weights(layer.mlp, f"{prefix}.mlp")
        else:
            gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
            weights |= {
                f"{prefix}.mlp.linear_fc1.weight": gate_up,
                f"{prefix}.mlp.linear_fc2.weight": layer.mlp.down_proj.weight,
            }
    return weights


def _expert_weights(block: Any, prefix: str) -> dict[str, Tensor]:
    """transformers 5 keeps all experts of a layer in two stacked parameters, gate above up."""
    weights = {f"{prefix}.router.weight": block.gate.weight}
    for index, (gate_up, down) in enumerate(zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)):
        weights[f"{prefix}.experts.local_experts.{index}.linear_fc1.weight"] = gate_up
        weights[f"{prefix}.experts.local_experts.{index}.linear_fc2.weight"] = down
    return weights
