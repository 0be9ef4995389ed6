"""Counted operations: against hand counts, the parameters, torch's own counter on Hugging Face's model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import NemotronHConfig, NemotronHForCausalLM

from mimo.protocols import LANGUAGE, FlopsProvider, ParameterShape
from mimo.registry import model_provider
from providers.common import flops
from providers.common.hf_nemotron import nemotron_config
from providers.common.hybrid import HybridConfig

TINY = HybridConfig(hybrid_layer_pattern="MEM*-E", hidden_size=32, num_attention_heads=4, num_query_groups=2,
                    kv_channels=8, ffn_hidden_size=48, vocab_size=128, mamba_num_heads=4, mamba_head_dim=8,
                    mamba_num_groups=2, mamba_state_dim=16, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24,
                    moe_shared_expert_intermediate_size=40, max_position_embeddings=64)
LENGTH = 16


def test_layers_cost_what_a_hand_count_says():
    layer = {symbol: flops.hybrid_layer_flops(TINY, symbol, 10) for symbol in "M*E-"}
    assert layer["-"] == 10 * 2 * (32 * 48 + 48 * 32)
    # Queries 32, keys and values 16 each; half of 10 x 10 scores, and as much for the values.
    assert layer["*"] == 10 * 2 * (32 * 64 + 32 * 32) + 2 * (10 * 10 / 2) * 2 * 32
    # Router, shared expert, two experts.
    assert layer["E"] == 10 * 2 * (32 * 4 + 2 * 32 * 40 + 2 * (2 * 32 * 24))
    # z and x 32 each, B and C 32 each, dt 4; a convolution over x, B and C; one chunk.
    scan = 10 * (10 * 2 * 16 + 10 * 32) + 10 * 4 * 16 * 32
    assert layer["M"] == 10 * 2 * (32 * (32 + 32 + 32 + 32 + 4) + 32 * 32) + 10 * 2 * 4 * 96 + scan
    assert flops.hybrid_flops(TINY, [10]) == 2 * (layer["M"] + layer["E"]) + layer["*"] + layer["-"] + 10 * 2 * 32 * 128


def test_the_scan_is_linear_from_chunk_to_chunk_and_attention_is_not():
    assert flops.ssd_flops(TINY, 512) == 4 * flops.ssd_flops(TINY, 128)
    assert flops.ssd_flops(TINY, 128) > 2 * flops.ssd_flops(TINY, 64)
    whole, halves = (flops.hybrid_flops(replace(TINY, hybrid_layer_pattern="*"), lengths)
                     for lengths in ([64], [32, 32]))
    assert whole - halves == 2 * 32 * (64**2 - 2 * 32**2)


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
    shapes = provider.parameter_shapes(provider.Config(**vars(config)), LANGUAGE)
    layers = config.layers + config.mtp_layers * config.num_mtp_depths
    others = sum({"M": flops.ssd_flops(config, LENGTH) + 2 * 4 * 96 * LENGTH,
                  "*": flops.attention_flops(LENGTH, 32, causal=True)}.get(symbol, 0) for symbol in layers)
    # Each depth of multi-token prediction has the logits once more.
    expected = 2 * LENGTH * (weights(shapes, config) + config.num_mtp_depths * 32 * 128)
    assert flops.hybrid_flops(config, [LENGTH]) - others == expected


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
    # It multiplies whole score matrices.
    full = flops.attention_flops(LENGTH, 32, causal=False) - flops.attention_flops(LENGTH, 32, causal=True)
    # Its convolution runs over the padding before the sequence, too.
    padding = 2 * 2 * 4 * 96 * 3
    expected = flops.hybrid_flops(TINY, [LENGTH]) - 2 * flops.ssd_flops(TINY, LENGTH) + full + padding
    assert found == expected


@pytest.mark.parametrize("name", ["llava", "mock", "nemotron-moe-vlm-tiny"])
def test_image_models_count_encoder_projector_and_language_in_order(name):
    provider = model_provider(name)
    assert isinstance(provider, FlopsProvider)
    config = replace(provider.Config(), vision_pixel_shuffle=2)
    found = provider.forward_flops(config, [50.0], [12.0, 4.0])
    assert list(found) == ["vision", "projector", LANGUAGE]
    hidden, channels = config.vision_hidden_size, config.vision_num_channels * config.vision_patch_size**2
    extra = vars(config).get("vision_class_token_len", int(vars(config).get("vision_class_token", 0)))
    shapes = provider.parameter_shapes(config, "vision")
    projector = [shape for shape in shapes if shape.name.startswith("projector")]
    assert found["projector"] == pytest.approx(2 * 16 * weights(projector, config))
    layers = weights([shape for shape in shapes if shape.count > 1 or shape.count == config.vision_num_layers], config)
    layers -= weights(projector, config) if config.vision_num_layers == 1 else 0
    expected = sum(2 * (4 * tokens + extra) * layers + config.vision_num_layers * 4 * (4 * tokens + extra) ** 2 * hidden
                   + 2 * 4 * tokens * channels * hidden for tokens in (12, 4))
    assert found["vision"] == pytest.approx(expected)


@pytest.mark.parametrize("experts", [0, 8])
def test_a_dense_or_sparse_decoder_costs_two_operations_a_parameter_and_token(experts):
    provider = model_provider("causal_lm")
    config = replace(provider.Config(), num_layers=2, hidden_size=64, num_attention_heads=4, num_experts=experts)
    found = provider.forward_flops(config, [LENGTH], [])[LANGUAGE] - 2 * flops.attention_flops(LENGTH, 64, causal=True)
    assert found == 2 * LENGTH * weights(provider.parameter_shapes(config, LANGUAGE), config)


@pytest.mark.parametrize(("frozen", "factors"), [
    ((), (3, 3, 3)), (("vision",), (1, 3, 3)), (("vision", "language"), (1, 3, 2)), (("language",), (3, 3, 2)),
    (("vision", "projector"), (1, 1, 3)), (("projector",), (3, 2, 3)),
])
def test_frozen_parts_cost_no_weight_gradients(frozen, factors):
    parts = {"vision": 100.0, "projector": 10.0, "language": 1.0}
    first_trained = next(name for name in parts if name not in frozen)
    expected = sum(factor * size for factor, size in zip(factors, parts.values(), strict=True))
    # The gradient of the first trained part's input would be needed by nobody: counted, as usual, all the same.
    assert flops.training_flops(parts, frozenset(frozen)) == expected, first_trained
