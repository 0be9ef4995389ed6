"""config.json of a Hugging Face folder against the model that takes its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig

from mimo import registry
from mimo.config.cli import parse
from mimo.weights.configuration import compare_folder, differing_fields, exported_configuration
from tests.support.hf_families import (
    CLIP,
    DEEPSEEK_MODELS,
    LLAVA_MODELS,
    LLAVA_NEXT_MODELS,
    NEMOTRON_MODELS,
    QWEN3_TOWER,
    QWEN_MODELS,
    QWEN_TEXT,
    QWEN_TOWER,
    SIGLIP,
    TEXT_MODELS,
    VOCAB_SIZE,
)

LLAVA = {"model_type": "llava", "image_token_index": VOCAB_SIZE - 1, **LLAVA_MODELS["clip-llama"]}
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("causal_lm", values) for name, values in TEXT_MODELS.items()},
    **{name: ("llava", {"model_type": "llava", "image_token_index": VOCAB_SIZE - 1, **values})
       for name, values in LLAVA_MODELS.items()},
    **{name: ("nemotron_h", values) for name, values in NEMOTRON_MODELS.items()},
    "deepseek": ("deepseek_v3", {"model_type": "deepseek_v3"}),
}
NEMOTRON_VLM = {"model_type": "NemotronH_Nano_VL_V2", "img_context_token_id": 18, "vit_hidden_size": 384,
                "llm_config": NEMOTRON_MODELS["nemotron-h"], "vision_config": {"args": {
                    "model": "vit_small_patch16_224", "cpe_max_size": 1024}}}
# The text model's keys are at the top, as in the published files.
FLAT_QWEN = {**QWEN_TEXT, "model_type": "qwen2_5_vl", "vision_config": QWEN_TOWER, "image_token_id": VOCAB_SIZE - 1}


def found_in(tmp_path: Path, provider: str, config: dict[str, Any], theirs: dict[str, Any] | None,
             *flags: str, modules: tuple[str, ...] = ("language",)) -> tuple[list[str], list[str]]:
    """Problems and notes of a folder with the config.json `theirs` for the model of the config.json `config`."""
    own, folder = tmp_path / "own", tmp_path / "folder"
    for place, values in ((own, config), (folder, theirs)):
        place.mkdir(exist_ok=True)
        if values is not None:
            (place / "config.json").write_text(json.dumps(values))
    run = parse(["--model-provider", provider, "--hf-config", str(own), *flags])
    return compare_folder(registry.model_provider(provider), run.model_family, folder, modules,
                          run.checkpoint.allowed_differences)


@pytest.mark.parametrize("name", ALL)
def test_a_model_agrees_with_its_own_config(tmp_path: Path, name: str) -> None:
    provider, values = ALL[name]
    modules = ("vision", "language") if provider == "llava" else ("language",)
    assert found_in(tmp_path, provider, values, values, modules=modules) == ([], [])


@pytest.mark.parametrize("name", [*ALL, "qwen3_vl"])
def test_an_export_without_a_base_has_no_end_token_of_a_class_of_transformers(tmp_path: Path, name: str) -> None:
    family, values = ALL.get(name, (name, None))
    provider = registry.model_provider(family)
    config = provider.Config() if values is None else provider.from_hf(values)
    (tmp_path / "config.json").write_text(json.dumps(exported_configuration(provider, config, None, ("language",))))
    found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path))
    assert (found.bos_token_id, found.eos_token_id) == (None, None)
    assert compare_folder(provider, config, tmp_path, ("language",), frozenset()) == ([], [])


@pytest.mark.parametrize(("change", "field", "values"), [
    ({"rope_theta": 1e6}, "rotary_base", (5e5, 1e6)),
    ({"rms_norm_eps": 1e-6}, "norm_epsilon", (0.05, 1e-6)),
    ({"rope_scaling": None}, "use_rope_scaling", (True, False)),
    ({"num_attention_heads": 8, "head_dim": 8}, "kv_channels", (16, 8)),
    ({"num_key_value_heads": 4}, "num_query_groups", (2, 4)),
    ({"model_type": "qwen2"}, "add_qkv_bias", (False, True)),
    ({"tie_word_embeddings": True}, "untie_embeddings_and_output_weights", (True, False)),
])
def test_every_key_that_changes_the_function_is_named(tmp_path, change, field, values):
    config = TEXT_MODELS["llama"]
    problems, notes = found_in(tmp_path, "causal_lm", config, config | change)
    flag = field.replace("_", "-")
    (line,) = [line for line in problems if f"--{flag} {values[0]}, but {values[1]} there (" in line]
    assert notes == [] and f"--allow-difference {flag}" in line and f"--hf-config {tmp_path / 'folder'}" in line
    keys = [line.split("--allow-difference ")[1].split()[0] for line in problems]
    allowed = [word for key in keys for word in ("--allow-difference", key)]
    problems, notes = found_in(tmp_path, "causal_lm", config, config | change, *allowed)
    assert problems == [] and len(notes) == len(keys)


def test_a_mistral_folder_is_a_llama_only_without_its_sliding_window(tmp_path: Path) -> None:
    config = TEXT_MODELS["llama"]
    theirs = config | {"model_type": "mistral", "sliding_window": 16}
    (line,), _ = found_in(tmp_path, "causal_lm", config, theirs)
    assert "sliding_window = 16 is not supported" in line and "--allow-difference hf-config" in line
    problems, notes = found_in(tmp_path, "causal_lm", config, theirs, "--allow-difference", "hf-config")
    assert problems == [] and "sliding_window" in notes[0]
    assert found_in(tmp_path, "causal_lm", config, theirs | {"sliding_window": None}) == ([], [])


@pytest.mark.parametrize(("tower", "named"), [
    (CLIP, []),
    ({"model_type": "clip", "vision_config": CLIP, "text_config": {}}, []),
    ({**LLAVA, "image_token_index": 7}, []),  # of the other model's vocabulary
    (CLIP | {"hidden_act": "gelu"}, ["--vision-hidden-act quick_gelu, but gelu there (vision_config.hidden_act)"]),
    (CLIP | {"layer_norm_eps": 1e-6}, ["--vision-norm-epsilon 0.03, but 1e-06 there"]),
    (CLIP | {"num_attention_heads": 2}, ["--vision-num-attention-heads 4, but 2 there"]),
    (SIGLIP, ["--vision-hidden-act quick_gelu, but gelu_tanh there", "--vision-class-token True, but False there",
              "--vision-patch-bias False, but True there", "--vision-pre-layernorm True, but False there"]),
    ({"model_type": "llava", **LLAVA_MODELS["clip-llama"], "vision_feature_layer": -1, "image_token_index": 98},
     ["--vision-num-layers 2, but 3 there (vision_feature_layer)"]),
])
def test_a_tower_of_its_own(tmp_path: Path, tower: dict[str, Any], named: list[str]) -> None:
    problems, _ = found_in(tmp_path, "llava", LLAVA, tower, modules=("vision",))
    assert len(problems) == len(named) and all(any(each in line for line in problems) for each in named), problems


def test_a_language_model_of_its_own(tmp_path: Path) -> None:
    text = LLAVA["text_config"]
    assert found_in(tmp_path, "llava", LLAVA, text) == ([], [])
    problems, _ = found_in(tmp_path, "llava", LLAVA, text | {"rope_theta": 5e5, "rms_norm_eps": 1e-5})
    assert len(problems) == 2
    (line,), _ = found_in(tmp_path, "llava", LLAVA, text | {"attention_bias": True})
    assert "attention_bias = True is not supported" in line


def test_layers_of_multi_token_prediction_may_be_left_out(tmp_path: Path) -> None:
    config = NEMOTRON_MODELS["nemotron-h"]
    assert found_in(tmp_path, "nemotron_h", config, config | {"num_nextn_predict_layers": 1}) == ([], [])
    (line,), _ = found_in(tmp_path, "nemotron_h", config, config | {"routed_scaling_factor": 2.0})
    assert "--moe-router-topk-scaling-factor 2.5, but 2.0 there (routed_scaling_factor)" in line


def test_without_config_json_the_run_says_so(tmp_path: Path) -> None:
    problems, (note,) = found_in(tmp_path, "causal_lm", TEXT_MODELS["llama"], None)
    assert problems == [] and "has no config.json" in note


def exported(folder: Path, provider: str, base: dict[str, Any], *, modules: tuple[str, ...] = ("vision", "language"),
             **fields: Any) -> dict[str, Any]:
    """config.json of an export with the base `base`, for the model that it describes with other values of `fields`."""
    (folder / "config.json").write_text(json.dumps(base))
    family = registry.model_provider(provider)
    config = dataclasses.replace(family.from_hf(base), **fields)
    written = exported_configuration(family, config, folder, modules)
    assert written is not None
    assert not any(differing_fields(family, config, written, module) for module in modules)
    return written


BASES = {
    **ALL, **{name: ("deepseek_v3", values) for name, values in DEEPSEEK_MODELS.items()},
    **{name: ("llava_next", {"model_type": "llava_next", **values}) for name, values in LLAVA_NEXT_MODELS.items()},
    **{name: ("qwen2_5_vl" if name.startswith("qwen2") else "qwen3_vl", values)
       for name, values in QWEN_MODELS.items()},
    "flat": ("qwen2_5_vl", FLAT_QWEN), "nemotron-vlm": ("nemotron-moe-vlm-20l", NEMOTRON_VLM),
    "nemotron-vlm-wide": ("nemotron-moe-vlm-20l", NEMOTRON_VLM | {
        "vision_config": NEMOTRON_VLM["vision_config"] | {"preferred_resolution": [512, 768]}}),
    "nemotron-vlm-dynamic": ("nemotron-moe-vlm-20l", NEMOTRON_VLM | {
        "vision_config": NEMOTRON_VLM["vision_config"] | {"min_num_patches": 4}})}


@pytest.mark.parametrize("name", BASES)
def test_a_base_of_the_same_model_stays_as_it_is(tmp_path: Path, name: str) -> None:
    provider, values = BASES[name]
    encoders = registry.model_provider(provider).encoders(None)
    assert exported(tmp_path, provider, values, modules=(*encoders, "language")) == values


@pytest.mark.parametrize(("name", "fields", "words"), [
    ("siglip-qwen3", {"vision_dynamic_resolution": True}, "--vision-dynamic-resolution: a LlavaConfig takes"),
    ("siglip-qwen3", {"vision_pixel_shuffle": 2}, "--vision-pixel-shuffle 2: a LlavaConfig takes images of one size"),
    ("nemotron-vlm", {"vision_image_width": 768}, "NemotronH_Nano_VL_V2 has images of one size as squares alone")])
def test_what_no_configuration_says_is_refused_with_a_base_too(tmp_path: Path, name: str, fields: dict[str, Any],
                                                               words: str) -> None:
    provider, values = BASES[name]
    for base in (values, values | {"unknown": 1}):
        with pytest.raises(ValueError, match=words):
            exported(tmp_path, provider, base, **fields)
    # The base of a language model alone says nothing about images.
    exported(tmp_path, provider, values, modules=("language",), **fields)


def test_values_of_a_text_model_are_written_where_the_base_has_them(tmp_path: Path) -> None:
    flat = FLAT_QWEN | {"rope_theta": 100.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
    del flat["rope_parameters"]
    for base in (FLAT_QWEN, flat):
        written = exported(tmp_path, "qwen2_5_vl", base, norm_epsilon=1e-3, rotary_base=7.0, vision_window_size=8)
        assert (written["rms_norm_eps"], written["rope_theta"]) == (1e-3, 7.0)
        assert written["rope_scaling"]["mrope_section"] == [1, 2, 1] and "rope_parameters" not in written
        assert written["vision_config"]["window_size"] == 8 and "text_config" not in written
        assert written["model_type"] == "qwen2_5_vl" and written["image_token_id"] == VOCAB_SIZE - 1
        other = exported(tmp_path, "qwen2_5_vl", base, vision_window_size=8)
        assert {key: other[key] for key in base.keys() - {"vision_config"}} == {
            key: base[key] for key in base.keys() - {"vision_config"}}, "the text model is the base's"
    text = LLAVA["text_config"]
    provider = registry.model_provider("llava")
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = dataclasses.replace(provider.from_hf(LLAVA), rotary_base=7.0)
    assert exported_configuration(provider, config, tmp_path, ("language",)) == text | {
        "rope_theta": 7.0, "rope_scaling": None, "head_dim": 8, "hidden_act": "silu", "tie_word_embeddings": False}


def holds(values: dict[str, Any], key: str) -> bool:
    """Whether a config.json, or the configuration of its text model, has a key with dots between levels."""
    for place in (values, values.get("text_config"), values.get("llm_config")):
        for name in key.split("."):
            place = place.get(name, ...) if isinstance(place, dict) else ...
        if place is not ...:
            return True
    return False


# Fields of which a configuration may say nothing: what a LLaVA cannot be, what follows from other keys, defaults.
UNSAID = {"vision_dynamic_resolution", "vision_pixel_shuffle", "vision_final_layernorm", "projector_hidden_size",
          "vision_num_channels", "kv_channels", "rope_type", "moe_router_pre_softmax",
          "moe_router_force_load_balancing"}


@pytest.mark.parametrize("name", [name for name in BASES if name != "nemotron-vlm-wide"])
def test_keys_that_messages_name_are_in_the_file(name: str) -> None:
    provider, base = BASES[name]
    family = registry.model_provider(provider)
    config = family.from_hf(base)
    written = family.hf_config(config)
    for module in (*family.encoders(config), "language"):
        unsaid = UNSAID if family.num_experts(config) else UNSAID | {"num_experts"}
        for field in family.computed_fields(config, module).keys() - unsaid:
            key = family.hf_key(field, written)
            assert holds(written, key), f"{field}: {key}"


@pytest.mark.parametrize(("name", "change", "line"), [
    ("qwen2.5-vl", {"image_token_id": 5}, "--image-token-id 151655, but 5 there (image_token_id)"),
    ("qwen2.5-vl", {"vision_config": QWEN_TOWER | {"depth": 5}},
     "--vision-num-layers 4, but 5 there (vision_config.depth)"),
    ("qwen3-vl", {"vision_config": QWEN3_TOWER | {"num_heads": 4}},
     "--vision-num-attention-heads 2, but 4 there (vision_config.num_heads)"),
    ("siglip-qwen3", {"image_token_index": 5}, "--image-token-id 98, but 5 there (image_token_index)"),
    ("nemotron-vlm", {"img_context_token_id": 5}, "--image-token-id 18, but 5 there (img_context_token_id)"),
    ("nemotron-vlm", {"projector_hidden_size": 8}, "--projector-hidden-size 4096, but 8 there (projector_hidden_size)"),
    ("nemotron-vlm", {"vision_config": {"args": {"model": "vit_base_patch16_224"}}, "vit_hidden_size": 768},
     "--vision-num-attention-heads 6, but 12 there (vision_config.args.model)"),
    ("nemotron-vlm", {"vision_config": {"args": {"model": "vit_small_patch16_224", "cpe_max_size": 512}}},
     "--vision-max-image-size 1024, but 512 there (vision_config.args.cpe_max_size)"),
    ("nemotron-vlm", {"vision_config": {"args": {"model": "vit_small_patch16_224"}, "max_resolution": 512}},
     "--vision-max-image-size 1024, but 512 there (vision_config.max_resolution)"),
    ("nemotron-h", {"n_routed_experts": 8}, "--num-experts 4, but 8 there (n_routed_experts)"),
    ("nemotron-h-latent", {"layer_norm_epsilon": 1e-6}, "--norm-epsilon 1e-05, but 1e-06 there (layer_norm_epsilon)"),
    ("nemotron-h-latent", {"layers_block_type": None, "hybrid_override_pattern": "*EE"},
     "--hybrid-layer-pattern *E, but *EE there (hybrid_override_pattern)"),
    ("deepseek", {"n_routed_experts": 512}, "--num-experts 256, but 512 there (n_routed_experts)"),
    ("deepseek", {"qk_nope_head_dim": 64}, "--qk-head-dim 128, but 64 there (qk_nope_head_dim)"),
    ("mixtral", {"num_local_experts": 8}, "--num-experts 4, but 8 there (num_local_experts)"),
    ("mixtral", {"intermediate_size": 24}, "--moe-ffn-hidden-size 48, but 24 there (intermediate_size)"),
    ("qwen3-moe", {"num_experts": 8}, "--num-experts 4, but 8 there (num_experts)")])
def test_a_difference_is_named_as_the_file_names_it(tmp_path: Path, name: str, change: dict[str, Any],
                                                    line: str) -> None:
    provider, values = BASES[name]
    modules = (*registry.model_provider(provider).encoders(None), "language")
    problems, _ = found_in(tmp_path, provider, values, values | change, modules=modules)
    assert any(line in problem for problem in problems), problems
