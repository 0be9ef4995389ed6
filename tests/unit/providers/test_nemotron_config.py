"""Configurations and weight maps of the Nemotron-H family as plain data: from and to Hugging Face."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from typing import Any

import pytest

from mimo.grid.dry_run import total_parameters
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider, provider_of
from providers import nemotron_h, nemotron_moe_vlm
from providers.common.hf_nemotron import (
    NEMOTRON_DEFAULTS,
    VLM_TYPES,
    nemotron_config,
    nemotron_sizes,
    vlm_config,
    vlm_sizes,
)

PROVIDER = model_provider("nemotron_h")
VLM = model_provider("nemotron-moe-vlm-tiny")
# What NVIDIA-Nemotron-3-Nano-30B-A3B's config.json says of sizes.
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
    "attention_dropout": 0.0, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": PATTERN, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "residual_in_fp32": False,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1,
    "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}
# What Nemotron-Nano-12B-v2-VL's config.json says beside its language model.
PUBLISHED_VLM: dict[str, Any] = {
    "architectures": ["NemotronH_Nano_VL_V2"], "model_type": "NemotronH_Nano_VL_V2", "force_image_size": 512,
    "downsample_ratio": 0.5, "patch_size": 16, "ps_version": "v2", "img_context_token_id": 18,
    "vit_hidden_size": 1280, "projector_hidden_size": 20480, "llm_config": PUBLISHED,
    "vision_config": {
        "adaptor_names": None, "feature_normalizer_config": None, "inter_feature_normalizer_config": None,
        "max_resolution": 2048, "patch_size": 16, "preferred_resolution": [512, 512], "vitdet_window_size": None,
        "args": {"model": "vit_huge_patch16_224", "in_chans": None, "cpe_max_size": 2048, "model_norm": False,
                 "cls_token_per_teacher": True, "register_multiple": 10, "teachers": [
                     {"name": "clip"}, {"name": "siglip2"}, {"name": "dino_v2"}, {"name": "sam", "use_summary": False},
                     {"name": "clip"}]}},
}
SMALL = nemotron_h.Config(
    hybrid_layer_pattern="ME*-", hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8,
    ffn_hidden_size=48, vocab_size=90, max_position_embeddings=64, mamba_num_heads=4, mamba_head_dim=8,
    mamba_num_groups=2, mamba_state_dim=16, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=40)


def test_defaults_are_the_published_model() -> None:
    found = nemotron_h.from_hf(PUBLISHED)
    assert found == nemotron_h.Config()
    # "31.6B total parameters", of the announcement of Nemotron 3 Nano.
    assert round(total_parameters(PROVIDER.parameter_shapes(found, LANGUAGE)) / 1e8) == 316


def test_defaults_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    defaults = transformers.NemotronHConfig().to_dict()
    assert {key: defaults[key] for key in NEMOTRON_DEFAULTS["nemotron_h"]} == NEMOTRON_DEFAULTS["nemotron_h"]


@pytest.mark.parametrize("pattern", ["ME*-", "M", "*-/*E", "MM/ME/ME"])
@pytest.mark.parametrize("latent", [0, 16])
def test_sizes_survive_a_hugging_face_configuration(pattern: str, latent: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(SMALL, hybrid_layer_pattern=pattern, moe_latent_size=latent)
    exported = PROVIDER.hf_config(config)
    assert exported["hybrid_override_pattern"] == config.layers
    loaded = transformers.NemotronHConfig(**exported)
    assert loaded.hybrid_override_pattern == config.layers and loaded.num_hidden_layers == config.num_layers
    # As it would be saved, with infinity in transformers' own spelling.
    for source in (exported, json.loads(loaded.to_json_string(use_diff=False))):
        assert nemotron_h.from_hf(source, SMALL) == config


def test_multi_token_prediction_is_built_where_the_configuration_has_it() -> None:
    one = PUBLISHED | {"num_nextn_predict_layers": 1}
    assert nemotron_sizes(one)["hybrid_layer_pattern"] == f"{PATTERN}/*E"
    two = one | {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*-"}
    assert nemotron_sizes(two)["hybrid_layer_pattern"] == f"{PATTERN}/*-/*-"
    layers = one | {"num_nextn_predict_layers": 2, "mtp_layers_block_type": ["mamba"]}
    assert nemotron_sizes(layers)["hybrid_layer_pattern"] == f"{PATTERN}/M/M"
    with pytest.raises(ValueError, match=r"mtp_layers_block_type = .*contradict each other"):
        nemotron_sizes(two | {"mtp_layers_block_type": ["mamba"]})
    unused = PUBLISHED | {"num_nextn_predict_layers": 0, "mtp_layers_block_type": ["attention", "moe"]}
    assert nemotron_sizes(unused)["hybrid_layer_pattern"] == PATTERN


@pytest.mark.parametrize(("mamba", "attention"), [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_layers_are_read_in_the_names_of_every_transformers(mamba: str, attention: str) -> None:
    saved = {key: value for key, value in PUBLISHED.items() if key != "hybrid_override_pattern"}
    saved |= {"layers_block_type": [mamba, "moe", attention, "mlp"], "num_nextn_predict_layers": 1,
              "mtp_layers_block_type": [attention, mamba]}
    assert nemotron_sizes(saved)["hybrid_layer_pattern"] == "ME*-/*M"
    assert vlm_sizes(PUBLISHED_VLM | {"llm_config": saved})["hybrid_layer_pattern"] == "ME*-/*M"


def test_layers_are_written_in_names_that_every_transformers_reads() -> None:
    exported = PROVIDER.hf_config(dataclasses.replace(SMALL, hybrid_layer_pattern="ME*-/*M"))
    assert exported["layers_block_type"] == ["mamba", "moe", "attention", "mlp"]
    assert exported["mtp_layers_block_type"] == ["attention", "mamba"]


def test_old_names_and_optional_values() -> None:
    old = {key: value for key, value in PUBLISHED.items() if key not in ("n_groups", "conv_kernel")}
    old |= {"mamba_n_groups": 4, "mamba_d_conv": 4, "num_key_value_heads": None, "head_dim": None}
    found = nemotron_sizes(old)
    assert (found["mamba_num_groups"], found["num_query_groups"], found["kv_channels"]) == (4, 32, 84)


@pytest.mark.parametrize(("change", "key"), [
    ({"model_type": "nemotron"}, "model_type = 'nemotron'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config.quant_method = 'modelopt'"),
    ({"num_experts_per_tok": 1}, "norm_topk_prob = True with {section}num_experts_per_tok = 1"),
    ({"num_experts_per_tok": 1, "norm_topk_prob": 1}, "norm_topk_prob = 1 with {section}num_experts_per_tok = 1"),
    ({"time_step_min": 0.01}, "time_step_min = 0.01"), ({"mamba_dt_min": 0.5}, "mamba_dt_min = 0.5"),
    ({"conv_kernel": 3}, "conv_kernel = 3"), ({"time_step_limit": [0.0, 1.0]}, "time_step_limit = [0.0, 1.0]"),
    ({"time_step_limit": [0.1, {"__float__": "Infinity"}]}, "time_step_limit = [0.1, inf]"),
    ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern = 'MX': symbol 'X'"),
    ({"layers_block_type": ["mamba", "moe+"]}, "layers_block_type[] = 'moe+'"),
    ({"layers_block_type": ["mamba"]}, "layers_block_type = ['mamba'] and {section}hybrid_override_pattern = "),
    ({"layer_types": ["mamba"]}, "layers_block_type = ['mamba'] and {section}hybrid_override_pattern = "),
    ({"mamba_n_groups": 4}, "mamba_n_groups = 4 and {section}n_groups = 8 are two names of one value"),
    ({"hybrid_override_pattern": None}, "layers_block_type is missing"),
    ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*?"}, "mtp_hybrid_override_pattern = '*?'"),
    ({"hybrid_override_pattern": "M-", "intermediate_size": [1, 2]}, "intermediate_size = 'list'"),
    ({"ssm_state_size": "128"}, "ssm_state_size = '128' is not a whole number"),
    ({"time_step_limit": 1.0}, "time_step_limit = 1.0 is not a list of two numbers"),
    ({"hybrid_override_pattern": 3}, "hybrid_override_pattern = 3 is not a string"),
    ({"per_layer_config": {"03": {"num_experts_per_tok": 4}}}, "per_layer_config = {{"),
])
def test_values_that_cannot_be_reproduced_are_named(change: dict[str, Any], key: str) -> None:
    # Most keys are tested by what docs/hf_config_keys.md says of them (test_hf_keys.py).
    with pytest.raises(ValueError, match=re.escape(key.format(section=""))):
        nemotron_sizes(PUBLISHED | change)
    with pytest.raises(ValueError, match=re.escape("llm_config." + key.format(section="llm_config."))):
        vlm_sizes(PUBLISHED_VLM | {"llm_config": PUBLISHED | change})


def test_the_weight_of_a_single_expert_is_never_normalized() -> None:
    single = nemotron_h.from_hf(PUBLISHED | {"num_experts_per_tok": 1, "norm_topk_prob": False})
    assert single.moe_router_topk == 1
    assert PROVIDER.hf_config(single)["norm_topk_prob"] is False
    assert PROVIDER.hf_config(nemotron_h.Config())["norm_topk_prob"] is True
    layout = Layout("disjoint", 1, (), GridSpec(LANGUAGE))
    with pytest.raises(ValueError, match=re.escape("--moe-router-topk-scaling-factor 0.0: Megatron Core would leave")):
        PROVIDER.validate(dataclasses.replace(SMALL, moe_router_topk_scaling_factor=0.0), layout, 64)


@pytest.mark.parametrize(("pattern", "change"), [
    ("M", {"n_group": 8, "sliding_window": 16, "mlp_bias": True}),
    ("*", {"conv_kernel": 3, "layer_norm_epsilon": 1e-6, "time_step_min": 0.1, "num_experts_per_tok": 1}),
    ("-", {"mamba_proj_bias": True, "n_shared_experts": 2, "time_step_limit": (0.0, 1.0)}),
    ("E", {"use_conv_bias": False, "attention_bias": True}),
])
def test_keys_of_other_kinds_of_layers_do_not_matter(pattern: str, change: dict[str, Any]) -> None:
    assert nemotron_sizes(PUBLISHED | change | {"hybrid_override_pattern": pattern})["hybrid_layer_pattern"] == pattern


# The VLM


@pytest.mark.parametrize(("section", "change", "message"), [
    ("", {"llm_config": "nemotron_h"}, "llm_config = 'nemotron_h' is not an object"),
    ("", {"vision_config": [1]}, "vision_config = [1] is not an object"),
    ("", {"force_image_size": "512"}, "force_image_size = '512' is not a whole number"),
    ("", {"projector_hidden_size": 20480.5}, "projector_hidden_size = 20480.5 is not a whole number"),
    ("", {"downsample_ratio": "0.5"}, "downsample_ratio = '0.5' is not a number"),
    ("", {"downsample_ratio": 0}, "downsample_ratio = 0 is not supported"),
    ("vision_config", {"preferred_resolution": [512]}, "vision_config.preferred_resolution = [512] is not a list of"),
    ("vision_config", {"args": "radio"}, "vision_config.args = 'radio' is not an object"),
    ("args", {"model_norm": "false"}, "vision_config.args.model_norm = 'false' is not true or false"),
    ("args", {"register_multiple": 2.5}, "vision_config.args.register_multiple = 2.5 is not a whole number"),
    ("args", {"teachers": ["clip"]}, "vision_config.args.teachers = ['clip'] is not a list of objects with a name"),
])
def test_values_of_a_wrong_kind_are_named(section: str, change: dict[str, Any], message: str) -> None:
    vision = PUBLISHED_VLM["vision_config"]
    if section == "args":
        change = {"args": vision["args"] | change}
    if section:
        change = {"vision_config": vision | change}
    with pytest.raises(ValueError, match=re.escape(message)):
        vlm_sizes(PUBLISHED_VLM | change)


def test_a_published_vlm() -> None:
    found = dataclasses.replace(nemotron_moe_vlm.Config(), **vlm_sizes(PUBLISHED_VLM))
    # 4 teachers, and registers up to the next multiple of 10.
    assert found.vision_class_token_len == 10
    kept = {"hybrid_layer_pattern": PATTERN, "num_query_groups": 2, "image_token_id": 18,
            "vision_final_layernorm": False, "vision_dynamic_resolution": False}
    assert found == dataclasses.replace(nemotron_moe_vlm.Config(), **kept)
    omni = {**PUBLISHED_VLM, "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
            "sound_config": {"model_type": "parakeet"},
            "vision_config": PUBLISHED_VLM["vision_config"] | {"min_num_patches": 1024, "max_num_patches": 13312}}
    assert vlm_sizes(omni) == vlm_sizes(PUBLISHED_VLM) | {"vision_dynamic_resolution": True}
    for architecture in VLM_TYPES:
        assert provider_of(architecture) == "nemotron-moe-vlm-20l"
    assert provider_of("NemotronHForCausalLM") == "nemotron_h"


def test_the_size_of_images() -> None:
    def sizes(**change: Any) -> tuple[int | None, int | None]:
        values = {key: value for key, value in PUBLISHED_VLM.items() if key != "force_image_size"} | change
        found = vlm_sizes(values | {"vision_config": PUBLISHED_VLM["vision_config"] | preferred})
        return found["vision_image_size"], found.get("vision_image_width")

    preferred = {"preferred_resolution": [256, 768]}
    assert sizes() == (256, 768) and sizes(force_image_size=512) == (512, None)
    # Images that keep their own sizes have no width.
    preferred |= {"min_num_patches": 4}
    assert sizes() == (256, None)
    preferred = {"preferred_resolution": [768, 768]}
    assert sizes() == (768, None)
    preferred = {"preferred_resolution": None}
    assert sizes() == (512, None)
    config = dataclasses.replace(VLM.Config(), vision_dynamic_resolution=False)
    assert VLM.hf_config(config)["vision_config"]["preferred_resolution"] == [32, 32]
    wide = dataclasses.replace(config, vision_image_width=64)
    with pytest.raises(ValueError, match="--vision-image-size 32 --vision-image-width 64: .* squares alone .force_"):
        VLM.hf_config(wide)
    # What the message advises.
    VLM.hf_config(dataclasses.replace(wide, vision_dynamic_resolution=True, vision_image_width=0))


@pytest.mark.parametrize(("args", "count"), [
    ({}, 4), ({"register_multiple": 8}, 8), ({"register_multiple": 4}, 8), ({"cpe_num_registers": 3}, 7),
    ({"cls_token_per_teacher": False, "register_multiple": 8}, 8), ({"cls_token_per_teacher": False}, 1),
    ({"teachers": []}, 1), ({"register_multiple": 0}, 4),
])
def test_number_of_class_tokens(args: dict[str, Any], count: int) -> None:
    vision = PUBLISHED_VLM["vision_config"]
    known = {key: value for key, value in vision["args"].items() if key != "register_multiple"}
    found = vlm_sizes(PUBLISHED_VLM | {"vision_config": vision | {"args": known | args}})
    assert found["vision_class_token_len"] == count


@pytest.mark.parametrize("provider", ["nemotron-moe-vlm-20l", "nemotron-moe-vlm-54l", "nemotron-moe-vlm-tiny"])
@pytest.mark.parametrize("change", [{"vision_dynamic_resolution": True}, {"vision_dynamic_resolution": False},
                                    {"vision_final_layernorm": False}, {"vision_class_token_len": 1},
                                    {"vision_pixel_shuffle": 1}, {"hybrid_layer_pattern": "ME*/*E"},
                                    {"moe_latent_size": 16}])
def test_a_vlms_sizes_survive_a_hugging_face_configuration(provider: str, change: dict[str, Any]) -> None:
    family = model_provider(provider)
    config = dataclasses.replace(family.Config(), **change)
    values = json.loads(json.dumps(family.hf_config(config)))
    assert values["llm_config"]["hybrid_override_pattern"] == config.layers
    assert dataclasses.replace(config, **vlm_sizes(values)) == config
    assert vlm_sizes(values).keys() <= {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(("change", "key"), [
    ({"model_type": "internvl"}, "model_type = 'internvl'"), ({"patch_size": 14}, "patch_size = 14"),
    ({"llm_config": None}, "llm_config is missing"), ({"img_context_token_id": None}, "img_context_token_id = None"),
    ({"vision_config": PUBLISHED_VLM["vision_config"] | {"args": {}}}, "vision_config.args.model = None"),
])
def test_values_that_a_vlm_cannot_reproduce_are_named(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=re.escape(key)):
        vlm_sizes(PUBLISHED_VLM | change)


@pytest.mark.parametrize(("change", "message"), [
    ({"untie_embeddings_and_output_weights": False}, "--no-untie-embeddings-and-output-weights"),
    ({"moe_router_enable_expert_bias": False}, "--no-moe-router-enable-expert-bias"),
    ({"norm_epsilon": 1e-6}, "--norm-epsilon 1e-06"),
    ({"vision_hidden_act": "gelu_tanh"}, "--vision-hidden-act gelu_tanh"),
    ({"vision_norm_epsilon": 1e-5}, "--vision-norm-epsilon 1e-05"),
    ({"projector_norm_epsilon": 1e-6}, "--projector-norm-epsilon 1e-06"),
    ({"vision_class_token_len": 0}, "--vision-class-token-len 0"),
])
def test_flags_that_config_json_cannot_hold_are_refused(change, message):
    config = VLM.Config() if any(name.startswith(("vision", "projector")) for name in change) else SMALL
    with pytest.raises(ValueError, match=message):
        (nemotron_config if config is SMALL else vlm_config)(dataclasses.replace(config, **change))


# Weight maps


def test_weight_map_names_every_row_once() -> None:
    weight_map = PROVIDER.weight_map(dataclasses.replace(SMALL, hybrid_layer_pattern="ME*-/*E/*E", moe_latent_size=16),
                                     LANGUAGE)
    names = [rule.megatron for rule in weight_map.rules]
    assert len(set(names)) == len(names)
    counts = Counter(name for rule in weight_map.rules for name in rule.hf)
    assert {name: count for name, count in counts.items() if count > 1} == {
        "backbone.layers.0.mixer.in_proj.weight": 5, "backbone.layers.0.mixer.conv1d.weight": 3,
        "backbone.layers.0.mixer.conv1d.bias": 3}
    kept = [rule.hf[0] for rule in weight_map.rules if rule.keep_fp32]
    assert kept == [f"{layer}.mixer.gate.e_score_correction_bias"
                    for layer in ("backbone.layers.1", "mtp.layers.1", "mtp.layers.3")]
    # Layers of both depths are numbered through; what joins and what ends a depth is in its first and last layer.
    mtp = {rule.megatron: rule.hf for rule in weight_map.rules if rule.megatron.startswith("mtp.")}
    assert mtp["mtp.layers.1.eh_proj.weight"] == ("mtp.layers.2.eh_proj.weight",)
    assert mtp["mtp.layers.1.final_layernorm.weight"] == ("mtp.layers.3.final_layernorm.weight",)
    assert mtp["mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.2.linear_fc1.weight"] == (
        "mtp.layers.1.mixer.experts.2.up_proj.weight",)


def test_rows_of_a_mamba_layer() -> None:
    rules = {rule.megatron: rule for rule in PROVIDER.weight_map(SMALL, LANGUAGE).rules}
    mixer = "decoder.layers.0.mixer."
    found = {name.removeprefix(mixer): (rule.rows.first, rule.rows.count, rule.rows.total)
             for name, rule in rules.items() if rule.rows is not None}
    # 4 heads of 8 channels, 2 groups of state 16.
    assert found == {
        "in_proj.weight.z": (0, 32, 132), "in_proj.weight.x": (32, 32, 132), "in_proj.weight.B": (64, 32, 132),
        "in_proj.weight.C": (96, 32, 132), "in_proj.weight.dt": (128, 4, 132),
        **{f"conv1d.{kind}.{part}": (32 * number, 32, 96) for kind in ("weight", "bias")
           for number, part in enumerate("xBC")}}


def test_spellings() -> None:
    text, vlm = PROVIDER.weight_map(SMALL, LANGUAGE), VLM.weight_map(VLM.Config(), LANGUAGE)
    embedding = "backbone.embeddings.weight"
    assert [scheme.apply(embedding) for scheme in text.schemes] == [
        embedding, "backbone.embedding.weight", f"language_model.{embedding}"]
    assert vlm.schemes[0].apply(embedding) == f"language_model.{embedding}"
    names = ["backbone.embedding.weight", "backbone.norm_f.weight", "lm_head.weight"]
    assert text.best_scheme(names).apply(embedding) == vlm.best_scheme(names).apply(embedding) == names[0]
    assert text.best_scheme([f"language_model.{embedding}"]).apply("lm_head.weight") == "language_model.lm_head.weight"


def test_unused_tensors_are_known_by_name() -> None:
    ignored = [pattern for pattern, _ in PROVIDER.weight_map(SMALL, LANGUAGE).ignored]

    def passes(name: str) -> bool:
        return any(re.search(pattern, name) for pattern in ignored)

    for name in ("mtp.layers.0.eh_proj.weight", "language_model.mtp.layers.1.norm.weight", "mlp1.0.weight",
                 "vision_model.radio_model.model.norm.weight", "sound_encoder.encoder.layers.0.x"):
        assert passes(name), name
    for name in ("backbone.layers.9.norm.weight", "lm_head.bias", "model.mtp.weight", "language_model.mlp1.0.weight"):
        assert not passes(name), name
    with_mtp = PROVIDER.weight_map(dataclasses.replace(SMALL, hybrid_layer_pattern="M/M"), LANGUAGE)
    assert not any(re.search(pattern, "mtp.layers.7.norm.weight") for pattern, _ in with_mtp.ignored)
    assert VLM.weight_map(VLM.Config(), LANGUAGE).stacked_layers is False
