"""Qwen2.5-VL and Qwen3-VL as plain data: configurations there and back, refused values, published sizes."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest

from mimo.grid.dry_run import bridge_width, total_parameters
from mimo.grid.layout import validate_layout
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, VideoSize
from mimo.registry import provider_of
from mimo.visual import TokenGrid, count_tokens
from providers import qwen2_5_vl, qwen3_vl
from providers.common.family import VISION

QWEN2_5, QWEN3 = qwen2_5_vl.provider, qwen3_vl.provider
LAYOUT = Layout("disjoint", 2, (GridSpec(VISION),), GridSpec(LANGUAGE, offset=1))
# Text model, inner width of the tower, tied: the published models. Compared with copies of config.json (3b; 32b but for
# depth and heads of the tower) and with a printed model (7b, docs/qwen2.5vl_graph.md of acproject/duorou) in public
# repositories. For 72b there is a table of its text model (those of Qwen2.5-72B), and one of the towers in the paper.
PUBLISHED_2_5: dict[str, tuple[dict[str, Any], int, bool]] = {
    "3b": ({"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936}, 3420, True),
    "7b": ({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064}, 3420, False),
    "32b": ({"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
             "num_key_value_heads": 8, "vocab_size": 152064}, 3456, False),
    "72b": ({"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 152064}, 3456, False),
}


def published_2_5(name: str) -> dict[str, Any]:
    """A config.json as it is published: the text model's keys at the top, and earlier names of some values."""
    text, inner, tied = PUBLISHED_2_5[name]
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **text,
        "attention_dropout": 0.0, "vision_token_id": 151654, "hidden_act": "silu", "max_position_embeddings": 128000,
        "max_window_layers": 70, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768,
        "tie_word_embeddings": tied, "use_sliding_window": False, "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": inner, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": text["hidden_size"], "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2, "temporal_patch_size": 2}}


# Text, tower, tied: the published models. Compared with torchtitan/experiments/qwen3_vl of pytorch/torchtitan (2b, 8b,
# 30b-a3b, 235b-a22b) and with copies of config.json in public repositories (4b, 32b).
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
PUBLISHED_3: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "2b": ({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8}, SMALL_TOWER, True),
    "4b": ({"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8},
           SMALL_TOWER, True),
    "8b": ({"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}, {},
           False),
    "32b": ({"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
             "num_key_value_heads": 8}, {}, False),
    "30b-a3b": ({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                 "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
                 "num_experts_per_tok": 8, "norm_topk_prob": True}, {}, False),
    "235b-a22b": ({"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
                   "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128,
                   "num_experts_per_tok": 8, "norm_topk_prob": True}, {}, False),
}


def published_3(name: str) -> dict[str, Any]:
    """A config.json as it is published, down to its spelling of the tower's type."""
    text, tower, tied = PUBLISHED_3[name]
    kind = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    return {
        "model_type": kind, "tie_word_embeddings": tied,
        "text_config": {"model_type": f"{kind}_text", "max_position_embeddings": 262144, "rope_theta": 5e6,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"}, **text},
        "vision_config": {"model_type": kind, "out_hidden_size": text["hidden_size"], **tower}}


def published(family: ModuleType, name: str) -> dict[str, Any]:
    return published_2_5(name) if family is qwen2_5_vl else published_3(name)


def test_families_are_found_by_their_architectures() -> None:
    assert provider_of("Qwen2_5_VLForConditionalGeneration") == "qwen2_5_vl"
    assert provider_of("Qwen3VLForConditionalGeneration") == "qwen3_vl"
    assert provider_of("Qwen3VLMoeForConditionalGeneration") == "qwen3_vl"
    assert qwen2_5_vl.from_hf(published_2_5("7b")) == qwen2_5_vl.Config()
    assert qwen3_vl.from_hf(published_3("8b")) == qwen3_vl.Config()


@pytest.mark.parametrize(("family", "kind"), [
    (qwen2_5_vl, "qwen2_5_vl"), (qwen3_vl, "qwen3_vl"), (qwen3_vl, "qwen3_vl_moe")])
def test_defaults_equal_those_of_transformers(family: ModuleType, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(kind).to_dict()
    size = full["vision_config"]["out_hidden_size"] = full["text_config"]["hidden_size"]
    assert family.from_hf({"model_type": kind, "vision_config": {"out_hidden_size": size}}) == family.from_hf(
        full | {"tie_word_embeddings": False})


@pytest.mark.parametrize(("family", "name"), [
    *((qwen2_5_vl, name) for name in PUBLISHED_2_5), *((qwen3_vl, name) for name in PUBLISHED_3)])
def test_published_models_have_the_tensors_of_transformers(family: ModuleType, name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config, provider = family.from_hf(published(family, name)), family.provider
    written = provider.hf_config(config)
    assert family.from_hf(written) == config
    # As transformers saves it now: Qwen2.5-VL's keys of the text model are no longer at the top.
    loaded = transformers.AutoConfig.for_model(**published(family, name))
    assert family.from_hf(loaded.to_dict()) == config
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**written))
    theirs = set(model.state_dict()) - ({"lm_head.weight"} if loaded.tie_word_embeddings else set())
    ours: set[str] = set()
    for module in (VISION, LANGUAGE):
        found = provider.weight_map(config, module)
        ours |= {found.schemes[1 if family is qwen2_5_vl else 0].apply(hf) for rule in found.rules for hf in rule.hf}
    assert ours == theirs
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    counted = sum(total_parameters(provider.parameter_shapes(unpadded, module)) for module in (VISION, LANGUAGE))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("family", "section", "change", "message"), [
    (qwen2_5_vl, "", {"model_type": "qwen2_vl"}, "model_type = 'qwen2_vl'"),
    (qwen2_5_vl, "", {"rope_scaling": {"type": "mrope", "mrope_interleaved": True}}, "mrope_interleaved = True"),
    (qwen2_5_vl, "vision_config", {"out_hidden_size": 4096}, "vision_config.out_hidden_size = 4096"),
    (qwen2_5_vl, "vision_config", {"temporal_patch_size": [2, 2]}, "temporal_patch_size = [2, 2]"),
    (qwen2_5_vl, "", {"text_config": "qwen2"}, "text_config = 'qwen2' is not an object"),
    (qwen2_5_vl, "", {"vision_config": [1]}, "vision_config = [1] is not an object"),
    (qwen2_5_vl, "", {"num_attention_heads": 0}, "num_attention_heads = 0 must be at least 1"),
    (qwen2_5_vl, "", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is not true or false"),
    (qwen2_5_vl, "vision_config", {"fullatt_block_indexes": 7}, "fullatt_block_indexes = 7 is not a list of whole num"),
    (qwen3_vl, "", {"vision_config": "tower"}, "vision_config = 'tower' is not an object"),
    (qwen3_vl, "", {"video_token_id": None}, "video_token_id = None is not a whole number"),
    (qwen3_vl, "", {"model_type": "qwen2_5_vl"}, "model_type = 'qwen2_5_vl'"),
    (qwen3_vl, "text_config", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved = False"),
    (qwen3_vl, "vision_config", {"out_hidden_size": 3584}, "out_hidden_size = 3584 is not supported; supported: tex"),
    (qwen3_vl, "vision_config", {"deepstack_visual_indexes": [16, 8]}, "deepstack_visual_indexes = [16, 8]"),
    (qwen3_vl, "vision_config", {"temporal_patch_size": [2, 2]}, "temporal_patch_size = [2, 2]"),
])
def test_values_that_the_model_cannot_reproduce_are_refused_by_key(family, section, change, message):
    # Most keys are tested by what docs/hf_config_keys.md says of them (test_hf_keys.py).
    config = published(family, "7b" if family is qwen2_5_vl else "8b")
    (config[section] if section else config).update(change)
    with pytest.raises(ValueError, match="--hf-config") as caught:
        family.from_hf(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(("family", "changes", "message"), [
    (qwen2_5_vl, {"num_attention_heads": 0}, "--num-attention-heads 0 must be at least 1"),
    (qwen2_5_vl, {"mrope_section": (16, 24, 20)}, "--mrope-section 16 24 20: needs three numbers (time, row, column)"),
    (qwen2_5_vl, {"use_rope_scaling": True}, "--use-rope-scaling is not defined for positions of three axes"),
    (qwen2_5_vl, {"vision_window_size": 27}, "--vision-window-size 27 is smaller than a language token; it must be"),
    (qwen2_5_vl, {"vision_full_attention_layers": (7, 32)}, "--vision-full-attention-layers 7 32: --vision-num-layers"),
    (qwen2_5_vl, {"vision_hidden_size": 1248}, "heads of 78 channels"),
    (qwen2_5_vl, {"image_token_id": 152064}, "--image-token-id 152064 must lie between 0 and --vocab-size"),
    (qwen3_vl, {"num_layers": 2, "num_query_groups": 8}, "--vision-deepstack-layers 8 16 24: --num-layers 2 must be"),
    (qwen3_vl, {"vision_deepstack_layers": (8, 27)}, "--vision-deepstack-layers 8 27: needs numbers of layers in"),
    (qwen3_vl, {"vision_num_position_embeddings": 2300}, "2300 is not a square; nearest: 2209 or 2304"),
    (qwen3_vl, {"mrope_section": (24, 20, 16)}, "--mrope-section 24 20 16: needs three numbers"),
    (qwen3_vl, {"mrope_section": (10, 27, 27)}, "have at most 21 for rows and 21 for columns"),
    (qwen3_vl, {"vision_hidden_size": 1184}, "heads of 74 channels"),
])
def test_sizes_that_do_not_fit_are_refused_by_flag(family: ModuleType, changes: dict[str, Any], message: str) -> None:
    validate_layout(LAYOUT, micro_batch_size=1, global_batch_size=1)
    family.provider.validate(family.Config(), LAYOUT, 4096)
    with pytest.raises(ValueError, match="--") as caught:
        family.provider.validate(dataclasses.replace(family.Config(), **changes), LAYOUT, 4096)
    assert message in str(caught.value)


# Qwen2.5-VL


def test_a_decoder_of_another_family_is_not_exported() -> None:
    for changes in ({"qk_layernorm": True}, {"add_qkv_bias": False}, {"kv_channels": 64, "mrope_section": (8, 12, 12)}):
        with pytest.raises(ValueError, match="Qwen2_5_VLForConditionalGeneration has a Qwen2 decoder|no Hugging Face"):
            QWEN2_5.hf_config(dataclasses.replace(qwen2_5_vl.Config(), **changes))


def test_a_module_alone_takes_its_part_of_a_configuration() -> None:
    base = qwen2_5_vl.from_hf(published_2_5("3b"))
    language = QWEN2_5.with_hf(base, published_2_5("32b"), LANGUAGE)
    assert language.hidden_size == 5120 and language.vision_ffn_hidden_size == base.vision_ffn_hidden_size == 3420
    vision = QWEN2_5.with_hf(base, published_2_5("32b"), VISION)
    assert vision == dataclasses.replace(base, vision_ffn_hidden_size=3456)
    text = {"model_type": "qwen2", **PUBLISHED_2_5["3b"][0], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 128000, "tie_word_embeddings": True}
    assert QWEN2_5.computed_fields(QWEN2_5.with_hf(base, text, LANGUAGE), LANGUAGE) == QWEN2_5.computed_fields(
        base, LANGUAGE)


def test_an_image_becomes_a_grid_of_tokens() -> None:
    config = qwen2_5_vl.Config()
    grid = QWEN2_5.token_grid(config, VISION, 756, 1036)
    assert (grid.rows, grid.columns, grid.frames) == (27, 37, 1)
    assert QWEN2_5.num_image_tokens(config, VISION, 756, 1036) == grid.size
    with pytest.raises(ValueError, match="multiples of 28"):
        QWEN2_5.num_image_tokens(config, VISION, 768, 1036)


def test_a_video_becomes_a_grid_in_time() -> None:
    config = qwen2_5_vl.Config()
    assert QWEN2_5.video_grid(config, VISION, VideoSize(56, 84, 6, 0.5)) == TokenGrid(2, 3, 3, frame_step=2.0)
    assert count_tokens(QWEN2_5, config, VISION, *VideoSize(56, 84, 6, 0.5)) == 18
    for size, message in ((VideoSize(56, 84, 5, 0.5), "a video of 5 frames: must be a multiple of"),
                          (VideoSize(56, 80, 6, 0.5), "multiples of 28"), (VideoSize(56, 84, 6), "0.0 seconds apart")):
        with pytest.raises(ValueError, match=message):
            QWEN2_5.video_grid(config, VISION, size)
    with pytest.raises(ValueError, match="--image-token-id 9 --video-token-id 9: must differ"):
        QWEN2_5.validate_sizes(dataclasses.replace(config, image_token_id=9, video_token_id=9))


# Qwen3-VL


def test_experts_are_read_in_both_forms_and_written_as_published() -> None:
    torch = pytest.importorskip("torch")
    from providers.common.qwen_weights import ExpertInStack

    matrix = torch.arange(12.0).view(4, 3)
    rule = ExpertInStack(4, 3)
    (written,) = rule.to_hf(matrix)
    assert written.shape == (1, 3, 4)
    assert rule.to_megatron([written]).equal(matrix) and rule.to_megatron([matrix[None]]).equal(matrix)
    with pytest.raises(ValueError, match="an expert of shape"):
        rule.to_megatron([torch.zeros(1, 4, 4)])
    with pytest.raises(ValueError, match="4 x 4 may be transposed or not"):
        ExpertInStack(4, 4).to_megatron([torch.zeros(1, 4, 4)])


def test_experts_of_a_configuration_may_replace_a_dense_decoder() -> None:
    base, experts = (qwen3_vl.from_hf(published_3(name)) for name in ("2b", "30b-a3b"))
    mixed = QWEN3.with_hf(base, published_3("30b-a3b"), LANGUAGE)
    for ours, theirs, module in ((mixed, experts, LANGUAGE), (mixed, base, VISION)):
        assert QWEN3.computed_fields(ours, module) == QWEN3.computed_fields(theirs, module)
    assert QWEN3.computed_fields(base, VISION) != QWEN3.computed_fields(experts, VISION)


def test_an_image_and_its_levels_on_the_bridge() -> None:
    config = qwen3_vl.Config()
    assert QWEN3.num_image_tokens(config, VISION, 768, 1024) == 24 * 32
    assert bridge_width(QWEN3, config, VISION) == 4 * 4096
    with pytest.raises(ValueError, match="multiples of 32"):
        QWEN3.num_image_tokens(config, VISION, 768, 1008)


def test_a_temporal_patch_is_positioned_as_an_image() -> None:
    config = qwen3_vl.Config()
    assert QWEN3.video_grid(config, VISION, VideoSize(64, 96, 2)) == QWEN3.token_grid(config, VISION, 64, 96)
    with pytest.raises(ValueError, match="a video of 4 frames: the family has a placeholder for every 2 frames"):
        QWEN3.video_grid(config, VISION, VideoSize(64, 96, 4, 0.5))
