"""Text models as plain data, and configurations of every family there and back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider, provider_of
from providers import causal_lm, llava
from tests.support.fitting import problems_of, text_layout

PROVIDER = model_provider("causal_lm")
SMALL = causal_lm.Config(
    num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=96, kv_channels=16,
    vocab_size=1000, max_position_embeddings=64, rotary_base=5e5, norm_epsilon=1e-4, moe_ffn_hidden_size=48)
MOE = {"num_experts": 6, "moe_router_topk": 3}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
# Hugging Face family -> what its decoders have beyond Llama's.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    "qwen2": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {"qk_layernorm": True, "moe_router_pre_softmax": True, **MOE},
    # Its experts have the width that dense layers have elsewhere.
    "mixtral": {"ffn_hidden_size": 48, **MOE},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_equal_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(kind).to_dict()
    assert causal_lm.from_hf({"model_type": kind}) == causal_lm.from_hf(full)


def test_a_published_mistral_without_a_sliding_window_is_a_llama() -> None:
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model("mistral").to_dict() | {"sliding_window": None}
    mistral = causal_lm.from_hf({"model_type": "mistral", "sliding_window": None})
    assert mistral == causal_lm.from_hf(full)
    assert PROVIDER.hf_config(mistral)["model_type"] == "llama"
    with pytest.raises(ValueError, match="sliding_window = 4096"):  # the default of its class
        causal_lm.from_hf({"model_type": "mistral"})
    assert provider_of("MistralForCausalLM") == "causal_lm"


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_configuration_comes_back_from_hugging_face(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(SMALL, **FAMILIES[kind])
    written = json.loads(json.dumps(PROVIDER.hf_config(config)))
    assert written["model_type"] == kind and written["architectures"][0].endswith("ForCausalLM")
    assert hasattr(transformers, written["architectures"][0])
    # Fields that a family does not have stay as they are in `base`.
    assert causal_lm.from_hf(written, config) == config
    transformers.AutoConfig.for_model(**json.loads(json.dumps(written))).save_pretrained(tmp_path)
    assert causal_lm.from_hf(tmp_path, config) == config
    assert PROVIDER.hf_config(dataclasses.replace(SMALL, hf_config=str(tmp_path))) == written


@pytest.mark.parametrize("clip", [True, False])
def test_a_llava_configuration_comes_back_from_hugging_face(clip: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name for field in dataclasses.fields(causal_lm.Config)}
    config = llava.Config(
        **{name: value for name, value in vars(SMALL).items() if name in fields}, image_token_id=7,
        vision_image_size=32, vision_patch_size=8, vision_num_channels=1, vision_hidden_size=48, vision_num_layers=5,
        vision_num_unused_layers=0, vision_num_attention_heads=6, vision_ffn_hidden_size=80, vision_norm_epsilon=1e-3,
        vision_class_token=clip, vision_pre_layernorm=clip, vision_patch_bias=not clip,
        vision_hidden_act="quick_gelu" if clip else "gelu_tanh")
    config = dataclasses.replace(config, **FAMILIES["qwen2"])
    written = json.loads(json.dumps(llava.provider.hf_config(config)))
    assert llava.from_hf(written, config) == config
    transformers.LlavaConfig(**json.loads(json.dumps(written))).save_pretrained(tmp_path)
    assert llava.from_hf(tmp_path, config) == config
    assert json.loads((tmp_path / "config.json").read_text())["image_seq_length"] == 16


@pytest.mark.parametrize(("config", "words"), [
    (dataclasses.replace(SMALL, add_qkv_bias=True, qk_layernorm=True), "--add-qkv-bias together with --qk-layernorm"),
    (dataclasses.replace(SMALL, add_qkv_bias=True, **MOE), "--add-qkv-bias together with --num-experts 6"),
    (dataclasses.replace(SMALL, moe_router_pre_softmax=True, **MOE), "--moe-router-pre-softmax without --qk-layernorm"),
    (llava.Config(projector_hidden_size=64), "--projector-hidden-size 64"),
    (llava.Config(vision_final_layernorm=True), "--vision-final-layernorm"),
    (llava.Config(vision_patch_bias=True), "--vision-class-token, --vision-pre-layernorm, --vision-patch-bias"),
    (llava.Config(vision_class_token=False, vision_pre_layernorm=False), "none of them"),
])
def test_flags_without_a_hugging_face_family_are_named(config: Any, words: str) -> None:
    provider = llava.provider if isinstance(config, llava.Config) else PROVIDER
    with pytest.raises(ValueError, match=words):
        provider.hf_config(config)


def test_sizes_of_mixtral_and_of_llama_3() -> None:
    mixtral = causal_lm.from_hf({"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 512})
    assert (mixtral.num_experts, mixtral.moe_router_topk, mixtral.moe_ffn_hidden_size) == (4, 2, 512)
    assert (mixtral.rotary_base, mixtral.query_groups, mixtral.qk_layernorm) == (1e6, 8, False)
    for rope in ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}):
        llama = causal_lm.from_hf({"model_type": "llama", "tie_word_embeddings": True, **rope})
        assert (llama.rotary_base, llama.use_rope_scaling, llama.rope_scaling_factor) == (5e5, True, 32.0)
        assert not llama.untie_embeddings_and_output_weights
    both = {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 500000, **LLAMA3}}
    assert causal_lm.from_hf({"model_type": "llama", **both}).rotary_base == 5e5
    # Llama 3 8B was trained at the length that its scaling starts from, which then need not be repeated.
    short = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    causal_lm.from_hf({"model_type": "llama", "max_position_embeddings": 8192, "rope_scaling": short})
    # Or it may be outside, where transformers prefers it.
    for rope in (short, LLAMA3):
        causal_lm.from_hf({"model_type": "llama", "original_max_position_embeddings": 8192, "rope_scaling": rope})


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "gemma"}, "model_type = 'gemma' is not supported"),
    ({"model_type": "llava"}, "model_type = 'llava' is not supported"),
    ({"model_type": "llama", "rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "rope_scaling.low_freq_factor = 2.0"),
    ({"model_type": "llama", "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "factor"}},
     "rope_scaling.factor is missing"),
    ({"model_type": "llama", "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "rope_scaling = {'rope_type': 'llama3'"),
    ({"model_type": "llama", "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 8.0}},
     "contradict each other: remove the wrong one"),
    ({"model_type": "qwen2", "rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}},
     "rope_theta = 1000000.0 and rope_parameters.rope_theta = 500000.0 contradict each other"),
    ({"model_type": "llama", "rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
     "original_max_position_embeddings = 64 and rope_scaling.original_max_position_embeddings = 8192 contradict each "),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0},
      "max_position_embeddings": 8192, "original_max_position_embeddings": 64},
     "rope_scaling.original_max_position_embeddings = 64 is not supported; supported: 8192"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
     "rope_scaling.type = 'linear' and rope_scaling.rope_type = 'default' contradict each other"),
])
def test_an_unsupported_value_is_an_error_that_names_its_key(change: dict[str, Any], words: str) -> None:
    # Most keys are tested by what docs/hf_config_keys.md says of them (test_hf_keys.py).
    with pytest.raises(ValueError, match="--hf-config: ") as caught:
        causal_lm.from_hf(change)
    assert words in str(caught.value)


def test_a_text_model_has_no_encoder_and_needs_no_flag_for_it() -> None:
    flags = "--model-provider causal_lm --dataset-provider mock --train-iters 1 --seq-length 64 --llm-tp 2".split()
    config = parse(flags)
    assert validate(config, 2).encoders == ()
    assert validate(parse([*flags, "--llm-only"]), 2).encoders == ()
    for wrong, words in (("--encoder-tp 2", "a model without encoder has no encoder grid: leave out --encoder-tp 2"),
                         ("--encoder-lr 1", "a run without an encoder would ignore --encoder-lr 1.0"),
                         ("--freeze vision", "unknown part vision; known are language")):
        with pytest.raises(ValueError, match=words):
            validate(parse([*flags, *wrong.split()]), 2)
    spec = PROVIDER.token_spec(config.model_family)
    assert (spec.vocab_size, spec.image_token_id, PROVIDER.special_token_ids(config.model_family)) == (32000, -1, {})
    with pytest.raises(ValueError, match="16 x 16 pixels: a text model takes no images"):
        PROVIDER.num_image_tokens(config.model_family, "vision", 16, 16)
    with pytest.raises(ValueError, match="a text model has no encoder vision"):
        PROVIDER.encoder_spec(config.model_family, "vision", None)


def test_problems_name_where_the_sizes_come_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 5}))
    lines = problems_of(PROVIDER, dataclasses.replace(
        SMALL, hf_config=str(tmp_path), moe_ffn_hidden_size=768), text_layout(pp=2, tp=3))
    assert any("--num-layers 5 is not divisible by --llm-pp 2" in line for line in lines)
    assert lines[-1] == f"(model sizes from --hf-config {tmp_path})" and len(lines) > 3


@given(st.integers(1, 300_000), st.integers(1, 512), st.integers(1, 16))
def test_the_vocabulary_is_padded_as_little_as_possible(vocab_size: int, unit: int, tp: int) -> None:
    config = causal_lm.Config(vocab_size=vocab_size, make_vocab_size_divisible_by=unit)
    padded = config.padded_vocab_size(tp)
    assert padded % unit == 0 and padded % tp == 0
    assert vocab_size <= padded < vocab_size + math.lcm(unit, tp)
    if unit % tp == 0:
        assert padded == config.padded_vocab_size()
    shapes = {shape.name: shape.shape for shape in PROVIDER.parameter_shapes(config, LANGUAGE)}
    assert shapes["output_layer.weight"][0] == config.padded_vocab_size()


@pytest.mark.parametrize(("change", "words"), [
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' is not a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not a number"),
    ({"rms_norm_eps": None}, "rms_norm_eps = None is not a number"),
    ({"hidden_size": "64"}, "hidden_size = '64' is not a whole number"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 is not a whole number"),
    ({"head_dim": True}, "head_dim = True is not a whole number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is not true or false"),
    ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false' is not true or false"),
    ({"rope_theta": "1e6"}, "rope_theta = '1e6' is not a number"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not an object"),
    ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor = '8' is not a number"),
    ({"layer_types": 2}, "layer_types = 2 is not supported"),
])
def test_a_value_of_another_kind_is_an_error_that_names_its_key(change: dict[str, Any], words: str) -> None:
    # A string such as "false" would count as true, and "1e-5" would end in a traceback.
    with pytest.raises(ValueError, match="--hf-config: ") as caught:
        causal_lm.from_hf({"model_type": "qwen3_moe"} | change)
    assert words in str(caught.value)
