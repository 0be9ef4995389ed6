"""The llava and mock providers as plain data: sizes from Hugging Face, checks, planning shapes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider
from providers import llava, mock
from providers.common.checks import Problems
from providers.common.family import VISION
from tests.support.fitting import layout, problems_of

SMALL, LLAVA = mock.Config(), model_provider("llava")
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def test_defaults_fit_and_are_llava_1_5_7b() -> None:
    provider = model_provider("llava")
    provider.validate(llava.Config(), layout({"tp": 4}, tp=8), 2048)
    assert provider.num_image_tokens(llava.Config(), "vision", 336, 336) == 576
    sizes = llava.from_hf({"model_type": "llava", "text_config": {
        "model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}})
    assert (sizes.num_query_groups, sizes.kv_channels) == (32, 128)
    assert dataclasses.replace(sizes, num_query_groups=0, kv_channels=0) == llava.Config()
    model_provider("mock").validate(SMALL, layout(), 64)
    assert model_provider("mock").num_image_tokens(SMALL, "vision", 32, 32) == 16


# Hugging Face configurations

@pytest.mark.parametrize("text", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("vision", ["clip_vision_model", "siglip_vision_model"])
def test_defaults_equal_those_of_transformers(text: str, vision: str) -> None:
    transformers = pytest.importorskip("transformers")
    given_sizes = {"model_type": "llava", "text_config": {"model_type": text}, "vision_config": {"model_type": vision},
                   "vision_feature_select_strategy": "default" if vision.startswith("clip") else "full"}
    full = transformers.LlavaConfig(**json.loads(json.dumps(given_sizes))).to_dict()
    assert llava.from_hf(given_sizes) == llava.from_hf(full)
    assert llava.from_hf({}) == llava.from_hf(transformers.LlavaConfig().to_dict())


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_tied_embeddings_are_those_of_transformers(outer: bool | None, inner: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {"model_type": "llava", "text_config": {"model_type": "qwen2"}}
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if inner is not None:
        config["text_config"]["tie_word_embeddings"] = inner
    theirs = transformers.LlavaConfig(**json.loads(json.dumps(config))).tie_word_embeddings
    assert llava.from_hf(config).untie_embeddings_and_output_weights is not theirs


def test_qwen3_moe_sizes() -> None:
    config = llava.from_hf({
        "image_token_index": 5, "vision_feature_layer": 3, "tie_word_embeddings": True,
        "vision_config": {"model_type": "clip_vision_model", "hidden_act": "gelu", "image_size": [64, 64]},
        "text_config": {"model_type": "qwen3_moe", "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 64,
                        "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}})
    assert (config.num_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (6, 3, 768)
    assert (config.kv_channels, config.num_query_groups, config.rotary_base) == (64, 4, 5e5)
    assert config.qk_layernorm and not config.moe_router_pre_softmax
    assert not config.untie_embeddings_and_output_weights and config.image_token_id == 5
    assert (config.vision_num_layers, config.vision_image_size, config.vision_hidden_act) == (3, 64, "gelu")


def test_a_tower_whose_patches_do_not_fill_its_images() -> None:
    # The published siglip-so400m-patch14-384, in models such as llava-interleave-qwen-7b-hf.
    config = llava.from_hf({
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 151646,
        "text_config": {"model_type": "qwen2", "vocab_size": 152000},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384,
                          "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26,
                          "patch_size": 14}})
    LLAVA.validate(config, layout(), 2048)
    assert LLAVA.num_image_tokens(config, VISION, 384, 384) == 27**2
    positions = {shape.name: shape.shape for shape in LLAVA.parameter_shapes(config, VISION)}
    assert positions["position_embeddings.weight"] == (27**2, 1152)


@pytest.mark.parametrize(("change", "key"), [
    ({"model_type": "llava_next"}, "model_type = 'llava_next'"),
    ({"image_token_id": 5, "image_token_index": 6}, "image_token_id = 5 and image_token_index = 6 are two names"),
    ({"text_config": {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}}, "num_experts = 4"),
    ({"vision_feature_layer": 0}, "vision_feature_layer"),
    ({"vision_feature_layer": -14}, "vision_feature_layer"),
    ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_feature_select_strategy"),
    ({"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type = 'pixtral'"),
    ({"vision_config": {"image_size": [224, 112]}}, "vision_config.image_size"),
    ({"text_config": {"model_type": "gemma"}}, "text_config.model_type = 'gemma'"),
    ({"text_config": {"hidden_act": "gelu"}}, "text_config.hidden_act"),
    ({"text_config": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}}, "rope_scaling.low_freq_factor"),
    ({"text_config": {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}}}, "rope_scaling.high_freq_factor = 2.0"),
    ({"text_config": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}}},
     "rope_scaling.original_max_position_embeddings = 4096"),
    ({"text_config": {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}}, "differs between layers"),
    ({"text_config": {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}}, "layer_types"),
])
def test_an_unsupported_value_is_an_error_that_names_its_key(change: dict[str, Any], key: str) -> None:
    # Most keys are tested by what docs/hf_config_keys.md says of them (test_hf_keys.py).
    with pytest.raises(ValueError, match="--hf-config") as caught:
        llava.from_hf({"vision_config": {"model_type": "clip_vision_model"}, **change})
    assert key in str(caught.value)


def test_hf_config_flag_wins_over_sizes_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"hidden_size": 2048}}))
    for path in (tmp_path, tmp_path / "config.json"):
        config = dataclasses.replace(SMALL, hf_config=str(path), hidden_dropout=0.25)
        resolved = llava.provider.resolved(config)
        assert isinstance(resolved, mock.Config) and resolved.hf_config == ""
        assert (resolved.hidden_size, resolved.vision_image_size, resolved.hidden_dropout) == (2048, 336, 0.25)
        assert llava.provider.resolved(resolved) == resolved
        provider = model_provider("mock")
        assert provider.hidden_size(config) == 2048 and provider.token_spec(config).vocab_size == 32000
        assert provider.special_token_ids(config) == {VISION: 32000}
        assert provider.parameter_shapes(config, LANGUAGE) == provider.parameter_shapes(resolved, LANGUAGE)
    found = problems_of(LLAVA, dataclasses.replace(SMALL, hf_config=str(tmp_path)), layout(tp=3), 1024)
    assert found[-1] == f"(model sizes from --hf-config {tmp_path})"


@pytest.mark.parametrize(("content", "words"), [(None, "there is no file"), ("{", "not JSON"), ("[]", "JSON object")])
def test_unreadable_hf_config(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        llava.provider.resolved(dataclasses.replace(SMALL, hf_config=str(tmp_path)))
    assert str(tmp_path) in str(caught.value)


# Checks

@pytest.mark.parametrize(("config", "grids", "message"), [
    ({}, layout(tp=3), "--num-attention-heads 8 is not divisible by --llm-tp 3; --llm-tp that fit: 1, 2, 4, 8"),
    ({"make_vocab_size_divisible_by": 0}, layout(), "--make-vocab-size-divisible-by 0 must be at least 1"),
    ({"use_rope_scaling": True, "rope_scaling_factor": 0.5}, layout(), "--rope-scaling-factor 0.5 must be at least 1"),
    ({"rope_scaling_factor": 4.0}, layout(), "--rope-scaling-factor 4.0 needs --use-rope-scaling"),
    ({"num_experts": 0, "moe_router_topk": 4}, layout(), "--moe-router-topk 4 needs --num-experts"),
    ({"moe_aux_loss_coeff": 0.5}, layout(), "--moe-aux-loss-coeff 0.5 needs --num-experts"),
    ({"moe_router_load_balancing_type": "aux_loss"}, layout(),
     "--moe-router-load-balancing-type aux_loss needs --num-experts"),
    ({"norm_epsilon": -1e-5}, layout(), "--norm-epsilon -1e-05 is not a number above 0"),
    ({"vision_norm_epsilon": float("nan")}, layout(), "--vision-norm-epsilon nan is not a number above 0"),
    ({"rotary_base": 0.0}, layout(), "--rotary-base 0.0 is not a number above 0"),
    ({"moe_aux_loss_coeff": -1.0}, layout(), "--moe-aux-loss-coeff -1.0 is below 0"),
    ({"hidden_dropout": 1.0}, layout(), "--hidden-dropout 1.0 is not in [0, 1)"),
    ({"attention_dropout": -0.1}, layout(), "--attention-dropout -0.1 is not in [0, 1)"),
    ({"num_query_groups": -1}, layout(), "--num-query-groups -1 is below 0"),
    ({"projector_hidden_size": -1}, layout(), "--projector-hidden-size -1 is below 0"),
    ({"ffn_hidden_size": 250}, layout(tp=4), "--ffn-hidden-size 250 is not divisible by --llm-tp 4; --llm-tp that "
                                                  "fit: 1, 2, 5, 10, 25, 50, 125, 250"),
    ({"num_attention_heads": 12, "num_query_groups": 3, "hidden_size": 144}, layout(tp=2),
     "--num-query-groups 3 and --llm-tp 2: one must divide the other"),
    ({}, layout(pp=3), "--num-layers 4 is not divisible by --llm-pp 3; --llm-pp that fit: 1, 2, 4"),
    ({"num_experts": 6}, layout(dp=4, ep=4), "--num-experts 6 is not divisible by --llm-ep 4; --llm-ep that "
                                                     "fit: 1, 2, 3, 6"),
    ({"num_experts": 6, "moe_ffn_hidden_size": 63}, layout(tp=2, expt_tp=2),
     "--moe-ffn-hidden-size 63 is not divisible by --llm-expt-tp 2; --llm-expt-tp that fit: 1, 3, 7, 9, 21, 63"),
    ({}, layout(dp=2, ep=2), "--llm-ep 2 and --llm-expt-tp 1 need --num-experts above 0"),
    ({"num_experts": 4, "moe_router_topk": 5}, layout(), "--moe-router-topk 5 must lie between 1 and --num-experts 4"),
    ({"num_experts": 4, "moe_router_topk": 1}, layout(), "--moe-router-topk 1 needs --moe-router-pre-softmax"),
    ({"hidden_size": 100}, layout(), "--hidden-size 100 is not divisible by --num-attention-heads 8; "
                                     "--num-attention-heads that fit: 1, 2, 4, 5, 10, 20, 25, 50, 100, or give "
                                     "--kv-channels"),
    ({"num_query_groups": 3}, layout(), "--num-attention-heads 8 is not divisible by --num-query-groups 3"),
    ({"kv_channels": 5}, layout(), "--kv-channels 5 is odd"),
    ({"max_position_embeddings": 32}, layout(cp=3, tp=2),
     "--seq-length 64 is not divisible by 12, twice --llm-cp 3 times --llm-tp 2; nearest --seq-length: 60 or 72"),
    ({"num_layers": 0}, layout(), "--num-layers 0 must be at least 1"),
    ({"image_token_id": 512}, layout(), "--image-token-id 512 must lie between 0 and --vocab-size 512"),
    ({"max_position_embeddings": 32}, layout(), "--seq-length 64 exceeds --max-position-embeddings 32"),
    ({"vision_patch_size": 33}, layout(), "--vision-image-size 32 is smaller than a patch, --vision-patch-size 33"),
    ({"vision_pixel_shuffle": 0}, layout(), "--vision-pixel-shuffle 0 must be at least 1"),
    ({"vision_pixel_shuffle": 3}, layout(), "--vision-pixel-shuffle 3 does not divide the 4 patches a side of "
     "--vision-image-size 32 with --vision-patch-size 8; --vision-pixel-shuffle that fit: 1, 2, 4"),
    ({"vision_dynamic_resolution": True}, layout(),
     "--vision-dynamic-resolution cannot be used with --vision-class-token: use --no-vision-class-token"),
    ({"vision_hidden_size": 66}, layout(), "--vision-hidden-size 66 is not divisible by --vision-num-"),
    ({"vision_patch_size": 4}, layout(), "an image becomes 64 tokens"),
    ({}, layout({"tp": 3}), "--vision-num-attention-heads 4 is not divisible by --encoder-tp 3"),
    ({"vision_ffn_hidden_size": 255}, layout({"tp": 2}), "--vision-ffn-hidden-size 255"),
    ({"projector_hidden_size": 127}, layout({"tp": 2}), "--projector-hidden-size 127 is not divisible"),
    ({}, layout({"pp": 4}), "--vision-num-layers 2 is not divisible by --encoder-pp 4; --encoder-pp that fit: "
                                   "1, 2"),
])
def test_parts_that_do_not_fit_are_named(config: dict[str, Any], grids: Layout, message: str) -> None:
    assert any(message in line for line in problems_of(LLAVA, dataclasses.replace(SMALL, **config), grids))


def test_every_problem_is_reported_at_once() -> None:
    found = problems_of(LLAVA, SMALL, layout({"tp": 3}, tp=3, pp=3))
    flags = ("--llm-pp 3", "--num-attention-heads 8", "--seq-length 64", "--encoder-tp 3")
    assert all(any(flag in line for line in found) for flag in flags)


def test_fewer_query_groups_than_tensor_ranks_fit() -> None:
    model_provider("mock").validate(dataclasses.replace(SMALL, num_query_groups=2), layout(tp=8), 64)


def test_text_only_layout_ignores_the_encoder() -> None:
    text_only = Layout("colocated", 1, (), GridSpec(LANGUAGE))
    model_provider("mock").validate(SMALL, text_only, 16)
    assert "no room" in problems_of(LLAVA, SMALL, layout(), 16)[0]


DYNAMIC = dataclasses.replace(SMALL, vision_dynamic_resolution=True, vision_class_token=False, vision_pixel_shuffle=3)


def test_images_of_any_size() -> None:
    provider = model_provider("mock")
    # The grid of the position embeddings need not be a multiple of the factor, nor need such an image fit the sequence.
    provider.validate(DYNAMIC, layout(), 16)
    spec = provider.token_spec(DYNAMIC)
    assert spec.packs_patches and (spec.image_size, spec.patch_size, spec.size_multiple) == (0, 8, 24)
    assert provider.num_image_tokens(DYNAMIC, "vision", 48, 72) == 6
    for size in ((48, 70), (16, 24), (0, 24), (-24, 24)):
        message = f"{size[0]} x {size[1]} pixels .* multiples of 24 .*--vision-patch-size 8 .*--vision-pixel-shuffle 3"
        with pytest.raises(ValueError, match=message):
            provider.num_image_tokens(DYNAMIC, "vision", *size)


def test_pixel_shuffle_of_images_of_one_size() -> None:
    provider, config = model_provider("mock"), dataclasses.replace(SMALL, vision_pixel_shuffle=2)
    provider.validate(config, layout(), 16)
    assert provider.token_spec(config) == provider.token_spec(SMALL) and not provider.token_spec(config).packs_patches
    assert provider.num_image_tokens(config, "vision", 32, 32) == 4
    with pytest.raises(ValueError, match="16 x 32 pixels .* --vision-image-size 32"):
        provider.num_image_tokens(config, "vision", 16, 32)


@pytest.mark.parametrize("config", [SMALL, DYNAMIC])
def test_the_projector_takes_the_features_of_a_token(config: llava.Config) -> None:
    shapes = {shape.name: shape.shape for shape in model_provider("mock").parameter_shapes(config, "vision")}
    assert shapes["projector.linear_fc1.weight"] == (128, 64 * config.vision_pixel_shuffle**2)
    assert shapes["position_embeddings.weight"] == (16 + config.vision_class_token, 64)


@pytest.mark.parametrize(("changes", "flag"), [
    ({"vision_pixel_shuffle": 1}, "--vision-dynamic-resolution"),
    ({"vision_dynamic_resolution": False, "vision_pixel_shuffle": 2}, "--vision-pixel-shuffle 2"),
])
def test_hugging_face_has_no_such_llava(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag}: a LlavaConfig takes images of one size"):
        model_provider("llava").hf_config(dataclasses.replace(DYNAMIC, **changes))


@given(st.integers(1, 400), st.integers(1, 40), st.booleans())
def test_suggestions_fit(value: int, divisor: int, multiples: bool) -> None:
    problems = Problems()
    problems.divides("seq_length", value, "llm_tp", divisor, multiples=multiples)
    if value % divisor == 0:
        assert problems.found == []
        return
    (message,) = problems.found
    suggestions = message.split(": ")[1].replace(" or ", ", ").replace(", ...", "").split(", ")
    for suggestion in map(int, suggestions):
        assert (suggestion % divisor if multiples else value % suggestion) == 0
