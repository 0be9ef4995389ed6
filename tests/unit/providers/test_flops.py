"""FLOPs of the families, compared with hand counts, parameters, and torch's counter on Hugging Face's model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import NemotronHConfig, NemotronHForCausalLM

from mimo.observability.flops import FlopComponent, FlopsProvider, SequenceSums, forward_flops
from mimo.protocols import LANGUAGE, ParameterShape
from mimo.registry import model_provider
from providers.common import flops
from providers.common.hf_nemotron import nemotron_config
from providers.common.hybrid import HybridConfig

TINY = HybridConfig(hybrid_layer_pattern="MEM*-E", hidden_size=32, num_attention_heads=4, num_query_groups=2,
                    kv_channels=8, ffn_hidden_size=48, vocab_size=128, mamba_num_heads=4, mamba_head_dim=8,
                    mamba_num_groups=2, mamba_state_dim=16, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24,
                    moe_shared_expert_intermediate_size=40, max_position_embeddings=64)
LENGTH = 16


def forward(components: list[FlopComponent], lengths: list[float], whole: bool = False) -> float:
    """FLOPs of a forward pass over sequences of the language model."""
    return sum(forward_flops(component, SequenceSums.of(lengths), whole=whole).total for component in components
               if component.module == LANGUAGE)


def linear(components: list[FlopComponent], module: str = LANGUAGE) -> float:
    """FLOPs a token of products with weights."""
    return sum(component.linear for component in components if component.module == module)


def test_layers_cost_what_a_hand_count_says():
    one = {symbol: forward(flops.hybrid_components(replace(TINY, hybrid_layer_pattern=symbol)), [10])
           - 10 * 2 * 32 * 128 for symbol in "M*E-"}
    assert one["-"] == 10 * 2 * (32 * 48 + 48 * 32)
    # Queries 32, keys and values 16 each; half of 10 x 10 scores, and as much for the values.
    assert one["*"] == 10 * 2 * (32 * 64 + 32 * 32) + 2 * (10 * 10 / 2) * 2 * 32
    # Router, shared expert, two experts.
    assert one["E"] == 10 * 2 * (32 * 4 + 2 * 32 * 40 + 2 * (2 * 32 * 24))
    # z and x 32 each, B and C 32 each, dt 4; a convolution over x, B and C; one chunk, half of its pairs.
    scan = 10 * 10 / 2 * 2 * (2 * 16 + 32) + 10 * 4 * 16 * 32
    assert one["M"] == 10 * 2 * (32 * (32 + 32 + 32 + 32 + 4) + 32 * 32) + 10 * 2 * 4 * 96 + scan
    whole = forward(flops.hybrid_components(TINY), [10])
    assert whole == 2 * (one["M"] + one["E"]) + one["*"] + one["-"] + 10 * 2 * 32 * 128


def test_every_depth_of_multi_token_prediction_has_projection_layers_and_logits():
    main, two = (flops.hybrid_components(replace(TINY, hybrid_layer_pattern=pattern)) for pattern in ("M", "M/*/*"))
    attention = flops.hybrid_components(replace(TINY, hybrid_layer_pattern="*"))
    assert forward(two, [10]) - forward(main, [10]) == 2 * (forward(attention, [10]) + 10 * 2 * 64 * 32)


def weights(shapes: list[ParameterShape], config: Any) -> float:
    """Parameters that multiply a token, as many of the experts' as it meets."""
    return sum(math.prod(shape.shape) * shape.count
               * (config.moe_router_topk / config.num_experts if shape.split == "expert" else 1)
               for shape in shapes if len(shape.shape) == 2 and "embedding" not in shape.name)


@pytest.mark.parametrize("pattern", ["MEM*-E", "E/*E/*E"])
@pytest.mark.parametrize("latent", [0, 16])
def test_linear_layers_cost_two_operations_a_parameter_and_token(pattern, latent):
    config = replace(TINY, hybrid_layer_pattern=pattern, moe_latent_size=latent)
    provider = model_provider("nemotron_h")
    config = provider.Config(**vars(config))
    # Each depth of multi-token prediction has the logits once more.
    expected = 2 * (weights(provider.parameter_shapes(config, LANGUAGE), config) + config.num_mtp_depths * 32 * 128)
    assert linear(provider.flop_components(config)) == expected


@pytest.mark.parametrize("flags", [{}, {"num_experts": 8}, {"num_query_groups": 1}])
def test_a_dense_or_sparse_decoder_costs_two_operations_a_parameter_and_token(flags):
    provider = model_provider("causal_lm")
    config = replace(provider.Config(), num_layers=2, hidden_size=64, num_attention_heads=4, **flags)
    components = provider.flop_components(config)
    assert linear(components) == 2 * weights(provider.parameter_shapes(config, LANGUAGE), config)
    # Query heads that share their keys have scores of their own.
    assert sum(component.attention for component in components) == 2 * 4 * 64


@pytest.mark.parametrize("rank", [0, 24])
def test_latent_attention_has_wider_queries_than_values(rank):
    provider = model_provider("deepseek_v3")
    config = replace(provider.Config(), num_layers=3, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96,
                     vocab_size=256, q_lora_rank=rank, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4,
                     v_head_dim=6, num_experts=8, moe_router_topk=4, moe_router_num_groups=1, moe_router_group_topk=1,
                     moe_ffn_hidden_size=20, moe_shared_expert_intermediate_size=40, first_k_dense_replace=1)
    components = provider.flop_components(config)
    assert linear(components) == 2 * weights(provider.parameter_shapes(config, LANGUAGE), config)
    assert sum(component.attention for component in components) == 3 * 2 * 4 * (12 + 6)


def test_hugging_face_model_computes_as_much():
    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**nemotron_config(TINY), attn_implementation="eager",
                                                 experts_implementation="eager")).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], use_cache=False)
    # Its scan is not the one that is counted: elementwise in transformers 5.12, products over padded chunks in 5.19.
    # Nothing else in a Mamba layer multiplies batches of matrices.
    found = counter.get_total_flops()
    for number, symbol in enumerate(TINY.layers):
        if symbol == "M":
            layer = counter.get_flop_counts()[f"NemotronHForCausalLM.model.layers.{number}"]
            found -= layer.get(torch.ops.aten.bmm, 0)
    # It multiplies whole score matrices. Its convolution runs over the padding before the sequence, too.
    padding = 2 * 2 * 4 * 96 * 3
    without_scan = [replace(component, scan=0.0, scan_pairs=0.0) for component in flops.hybrid_components(TINY)]
    assert found == forward(without_scan, [LENGTH], whole=True) + padding


@pytest.mark.parametrize("name", ["llava", "mock", "nemotron-moe-vlm-20l", "nemotron-moe-vlm-tiny"])
def test_image_models_count_encoder_projector_and_language_in_order(name):
    provider = model_provider(name)
    assert isinstance(provider, FlopsProvider)
    config = replace(provider.Config(), vision_pixel_shuffle=2)
    components = provider.flop_components(config)
    parts = [component.part for component in components]
    assert list(dict.fromkeys(parts)) == ["vision", "projector", LANGUAGE] and parts == sorted(
        parts, key=["vision", "projector", LANGUAGE].index)
    patches, layers, *projector = [component for component in components if component.module == "vision"]
    shapes = provider.parameter_shapes(config, "vision")
    held = [shape for shape in shapes if shape.name.startswith("projector")]
    assert sum(component.linear for component in projector) == 2 * weights(held, config)
    assert {component.tokens_per_token for component in projector} == {1} and layers.tokens_per_token == 4
    hidden, pixels = config.vision_hidden_size, config.vision_num_channels * config.vision_patch_size**2
    assert patches.linear == 2 * pixels * hidden and patches.extra_tokens == 0
    inside = [shape for shape in shapes if shape.name.startswith(("self_attention", "mlp"))]
    assert layers.linear == 2 * weights(inside, config)
    assert layers.attention == config.vision_num_layers * 4 * hidden and not layers.causal
    extra = vars(config).get("vision_class_token_len", int(vars(config).get("vision_class_token", 0)))
    assert layers.extra_tokens == extra > 0


@pytest.mark.parametrize("name", ["causal_lm", "deepseek_v3", "llava", "nemotron_h", "nemotron-moe-vlm-54l"])
def test_every_family_says_what_each_of_its_modules_computes(name):
    provider = model_provider(name)
    assert isinstance(provider, FlopsProvider)
    config = provider.Config()
    modules = {component.module for component in provider.flop_components(config)}
    assert modules == {LANGUAGE, *provider.encoders(config)}
