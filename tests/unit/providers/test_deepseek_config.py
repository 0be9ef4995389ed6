"""The deepseek_v3 provider as plain data: sizes from and to Hugging Face, checks, planning shapes, weight map."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from mimo.grid.dry_run import total_parameters
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider
from providers import deepseek_v3
from tests.support.fitting import problems_of, text_layout

PROVIDER = model_provider("deepseek_v3")
# The published config.json, less its quantization.
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN,
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}
SMALL = deepseek_v3.Config(
    num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=90, num_experts=8,
    moe_router_topk=2, moe_ffn_hidden_size=16, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
    v_head_dim=12, first_k_dense_replace=1, moe_shared_expert_intermediate_size=32, moe_router_num_groups=2,
    moe_router_group_topk=1, max_position_embeddings=64)


def test_defaults_are_the_published_model() -> None:
    found = deepseek_v3.from_hf(PUBLISHED)
    assert found.ignored_mtp_layers == 1
    assert dataclasses.replace(found, ignored_mtp_layers=0) == deepseek_v3.Config()
    PROVIDER.validate(found, text_layout(tp=8, dp=8, ep=64), 4096)
    # "a strong MoE language model with 671B total parameters" (arXiv:2412.19437).
    assert round(total_parameters(PROVIDER.parameter_shapes(found, LANGUAGE)) / 1e9) == 671


def test_defaults_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    full = transformers.DeepseekV3Config().to_dict()
    assert deepseek_v3.from_hf({"model_type": "deepseek_v3"}) == deepseek_v3.from_hf(full)
    yarn = {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 8.0}}
    full = transformers.DeepseekV3Config(rope_scaling=dict(yarn["rope_scaling"])).to_dict()
    assert deepseek_v3.from_hf(yarn) == deepseek_v3.from_hf(full)
    assert deepseek_v3.from_hf(yarn).original_max_position_embeddings == 4096


@pytest.mark.parametrize("change", [
    {}, {"q_lora_rank": 0}, {"rope_type": "rope", "rotary_base": 5e5}, {"first_k_dense_replace": 0},
    {"untie_embeddings_and_output_weights": False}, {"moe_router_num_groups": 1}, {"norm_epsilon": 1e-5},
    {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16.0, "rotary_scaling_factor": 3.5},
    {"mscale": 1.0, "mscale_all_dim": 0.0},
])
def test_sizes_survive_a_hugging_face_configuration(change: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(SMALL, **change)
    exported = PROVIDER.hf_config(config)
    loaded = transformers.DeepseekV3Config(**PROVIDER.hf_config(config)).to_dict()
    if config.rope_type == "rope":  # what yarn alone reads
        config = dataclasses.replace(config, rotary_scaling_factor=40.0, original_max_position_embeddings=4096)
    for source in (exported, loaded):
        assert deepseek_v3.from_hf(source, SMALL) == config
        assert source["moe_router_dtype"] == "float32", "vLLM reads it from what transformers has loaded"


@pytest.mark.slow
def test_vllm_routes_in_float32_as_the_trainer_does() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("vllm")
    from vllm.model_executor.models.deepseek_v2 import _get_moe_router_dtype

    config = transformers.DeepseekV3Config(**PROVIDER.hf_config(SMALL))
    assert str(_get_moe_router_dtype(config)) == "torch.float32"
    del config.moe_router_dtype
    assert _get_moe_router_dtype(config) is None, "it would do without being told"


@pytest.mark.parametrize(("change", "key"), [
    ({"model_type": "deepseek_v2"}, "model_type = 'deepseek_v2'"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "contradict each other"),
    ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "contradict each other"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 8}, "contradict each other"),
    ({"rope_scaling": YARN | {"attention_factor": 1.5}}, "rope_scaling.attention_factor = 1.5"),
    ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate = False"),
    ({"rope_scaling": YARN | {"mscale": None}}, "rope_scaling.mscale = None"),
])
def test_values_that_cannot_be_reproduced_are_named(change: dict[str, Any], key: str) -> None:
    # Most keys are tested by what docs/hf_config_keys.md says of them (test_hf_keys.py).
    with pytest.raises(ValueError, match=re.escape(key)):
        deepseek_v3.from_hf(PUBLISHED | change)


@pytest.mark.parametrize(("change", "message"), [
    ({"latent_norm_epsilon": 1e-5}, "--latent-norm-epsilon 1e-05"),
    ({"moe_router_enable_expert_bias": False}, "--no-moe-router-enable-expert-bias"),
])
def test_flags_that_config_json_cannot_hold_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PROVIDER.hf_config(dataclasses.replace(SMALL, **change))


@pytest.mark.parametrize(("change", "grid", "seq_length", "message"), [
    ({"kv_lora_rank": 0}, {}, 64, "--kv-lora-rank 0 must be at least 1"),
    ({"q_lora_rank": -1}, {}, 64, "--q-lora-rank -1 is below 0"),
    ({"latent_norm_epsilon": 0.0}, {}, 64, "--latent-norm-epsilon 0.0 is not a number above 0"),
    ({"moe_aux_loss_coeff": -1e-4}, {}, 64, "--moe-aux-loss-coeff -0.0001 is below 0"),
    ({"num_query_groups": 2}, {}, 64, "--num-query-groups 2 has no effect in latent attention"),
    ({"rope_type": "rope", "rotary_scaling_factor": 4.0}, {}, 64, "--rotary-scaling-factor 4.0 needs --rope-type yarn"),
    ({"rope_type": "rope", "mscale": 0.7}, {}, 64, "--mscale 0.7 needs --rope-type yarn"),
    ({"qk_layernorm": False}, {}, 64, "--no-qk-layernorm"),
    ({"qk_pos_emb_head_dim": 7}, {}, 64, "--qk-pos-emb-head-dim 7 is odd"),
    ({"first_k_dense_replace": 4}, {}, 64, "--first-k-dense-replace 4 must lie between 0 and --num-layers 4"),
    ({"rotary_scaling_factor": 0.5}, {}, 64, "--rotary-scaling-factor 0.5 is below 1"),
    ({"moe_router_topk_scaling_factor": 0.0}, {}, 64,
     "--moe-router-topk-scaling-factor 0.0: Megatron Core would leave"),
    ({"moe_router_topk": 1}, {}, 64, "--moe-router-topk 1 must lie between 2 and --num-experts 8"),
    ({"moe_router_topk": 3}, {}, 64, "--moe-router-topk 3 with --moe-router-group-topk 1 must be 2"),
    ({"moe_router_num_groups": 3}, {}, 64, "--num-experts 8 is not divisible by --moe-router-num-groups 3"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 6}, {}, 64,
     "--moe-router-topk must be 4 or 5"),
    ({"moe_router_num_groups": 8, "moe_router_group_topk": 1, "moe_router_topk": 2}, {}, 64, "exceeds the 1 experts"),
    ({"moe_router_group_topk": 3}, {}, 64, "--moe-router-group-topk 3 exceeds --moe-router-num-groups 2"),
    ({"moe_shared_expert_intermediate_size": 24}, {}, 64, "is not divisible by --moe-ffn-hidden-size 16"),
    ({}, {"pp": 3}, 64, "--num-layers 4 is not divisible by --llm-pp 3"),
    ({"num_attention_heads": 3}, {"tp": 2}, 64, "--num-attention-heads 3 is not divisible by --llm-tp 2"),
    ({"q_lora_rank": 25}, {"tp": 2}, 64, "--q-lora-rank 25 is not divisible by --llm-tp 2"),
    ({"kv_lora_rank": 15}, {"tp": 2}, 64,
     "--kv-lora-rank 15 + --qk-pos-emb-head-dim 8 = 23 is not divisible by --llm-tp 2"),
    ({"ffn_hidden_size": 49}, {"tp": 2}, 64, "--ffn-hidden-size 49 is not divisible by --llm-tp 2"),
    ({"num_experts": 6}, {"dp": 4, "ep": 4}, 64, "--num-experts 6 is not divisible by --llm-ep 4"),
    ({}, {}, 128, "--seq-length 128 exceeds --max-position-embeddings 64"),
    ({}, {"cp": 2}, 62, "--seq-length 62 is not divisible by 4, twice --llm-cp 2"),
])
def test_sizes_that_contradict_each_other_or_a_grid(change, grid, seq_length, message):
    config = dataclasses.replace(SMALL, **change)
    if grid and seq_length == 64:
        PROVIDER.validate(config, text_layout(), 64)
    assert message in "\n".join(problems_of(PROVIDER, config, text_layout(**grid), seq_length))


def test_weight_map_names_every_tensor_once() -> None:
    weight_map = PROVIDER.weight_map(dataclasses.replace(SMALL, ignored_mtp_layers=1), LANGUAGE)
    ours = [rule.megatron for rule in weight_map.rules]
    theirs = [name for rule in weight_map.rules for name in rule.hf]
    assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
    kept = [rule.hf[0] for rule in weight_map.rules if rule.keep_fp32]
    assert kept == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]
    # The layer that a published checkpoint has after the last one, and no other.
    ignored = [pattern for pattern, _ in weight_map.ignored]
    assert any(re.search(pattern, "model.layers.4.eh_proj.weight") for pattern in ignored)
    for name in [*theirs, "model.layers.5.eh_proj.weight", "model.layers.40.input_layernorm.weight"]:
        assert not any(re.search(pattern, name) for pattern in ignored), name


def test_a_bias_that_is_off_is_in_no_rule() -> None:
    config = dataclasses.replace(SMALL, moe_router_enable_expert_bias=False)
    assert not any("expert_bias" in rule.megatron for rule in PROVIDER.weight_map(config, LANGUAGE).rules)
