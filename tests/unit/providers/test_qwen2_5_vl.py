"""Qwen2.5-VL as plain data: configurations there and back, refused values, published sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mimo.data.positions import TokenGrid
from mimo.grid.dry_run import total_parameters
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, VideoSize
from mimo.registry import model_provider, provider_of
from mimo.visual import count_tokens
from providers import qwen2_5_vl
from providers.common import hf_qwen_vl
from providers.common.vision_language import VISION

PROVIDER = model_provider("qwen2_5_vl")
# Text model, inner width of the tower, tied: the published models. Compared with copies of config.json (3b; 32b but for
# depth and heads of the tower) and with a printed model (7b, docs/qwen2.5vl_graph.md of acproject/duorou) in public
# repositories. For 72b there is a table of its text model (those of Qwen2.5-72B), and one of the towers in the paper.
PUBLISHED: dict[str, tuple[dict[str, Any], int, bool]] = {
    "3b": ({"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936}, 3420, True),
    "7b": ({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064}, 3420, False),
    "32b": ({"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
             "num_key_value_heads": 8, "vocab_size": 152064}, 3456, False),
    "72b": ({"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 152064}, 3456, False),
}


def published(name: str) -> dict[str, Any]:
    """A config.json as it is published: the text model's keys at the top, and earlier names of some values."""
    text, inner, tied = PUBLISHED[name]
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


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with the text model's keys in `text_config`, as transformers saves it now."""
    transformers = pytest.importorskip("transformers")
    found: dict[str, Any] = transformers.Qwen2_5_VLConfig(**config).to_dict()
    return found


def test_the_family_is_found_by_its_architecture() -> None:
    assert provider_of("Qwen2_5_VLForConditionalGeneration") == "qwen2_5_vl"
    assert qwen2_5_vl.from_hf(published("7b")) == qwen2_5_vl.Config()


def test_defaults_equal_those_of_transformers() -> None:
    full = nested({})
    full["vision_config"]["out_hidden_size"] = full["text_config"]["hidden_size"]
    assert qwen2_5_vl.from_hf({"vision_config": {"out_hidden_size": 8192}}) == qwen2_5_vl.from_hf(full)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_tensors_of_transformers(name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = qwen2_5_vl.from_hf(published(name))
    assert qwen2_5_vl.from_hf(nested(published(name))) == config
    written = PROVIDER.hf_config(config)
    assert qwen2_5_vl.from_hf(written) == config
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**written))
    theirs = set(model.state_dict()) - ({"lm_head.weight"} if PUBLISHED[name][2] else set())
    ours: set[str] = set()
    for module in (VISION, LANGUAGE):
        found = PROVIDER.weight_map(config, module)
        ours |= {found.schemes[1].apply(hf) for rule in found.rules for hf in rule.hf}
    assert ours == theirs
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    counted = sum(total_parameters(PROVIDER.parameter_shapes(unpadded, module)) for module in (VISION, LANGUAGE))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("section", "change", "message"), [
    ("", {"model_type": "qwen2_vl"}, "model_type = 'qwen2_vl'"),
    ("", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type = 'yarn'"),
    ("", {"rope_scaling": {"type": "mrope", "mrope_interleaved": True}}, "mrope_interleaved = True"),
    ("", {"head_dim": 64}, "head_dim = 64"),
    ("vision_config", {"out_hidden_size": 4096}, "vision_config.out_hidden_size = 4096"),
    ("vision_config", {"in_chans": 1}, "vision_config.in_chans = 1"),
    ("vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act = 'gelu'"),
    ("vision_config", {"spatial_patch_size": 16}, "vision_config.spatial_patch_size = 16"),
    ("vision_config", {"temporal_patch_size": [2, 2]}, "temporal_patch_size = [2, 2]"),
    ("vision_config", {"rope_parameters": {"rope_theta": 100.0}}, "rope_parameters.rope_theta = 100.0"),
])
def test_values_that_the_model_cannot_reproduce_are_refused_by_key(section: str, change: dict[str, Any],
                                                                   message: str) -> None:
    config = published("7b")
    (config[section] if section else config).update(change)
    with pytest.raises(ValueError, match="--hf-config") as caught:
        qwen2_5_vl.from_hf(config)
    assert message in str(caught.value)


LAYOUT = Layout("disjoint", 2, (GridSpec(VISION),), GridSpec(LANGUAGE, offset=1))


@pytest.mark.parametrize(("changes", "message"), [
    ({"mrope_section": (16, 24, 20)}, "--mrope-section 16 24 20: needs three numbers (time, row, column) that sum"),
    ({"use_rope_scaling": True}, "--use-rope-scaling is not defined for positions of three axes"),
    ({"vision_window_size": 27}, "--vision-window-size 27 is smaller than a language token; it must be at least 28"),
    ({"vision_full_attention_layers": (7, 32)}, "--vision-full-attention-layers 7 32: --vision-num-layers 32 has no"),
    ({"vision_hidden_size": 1248}, "heads of 78 channels"),
    ({"image_token_id": 152064}, "--image-token-id 152064 must lie between 0 and --vocab-size"),
])
def test_sizes_that_do_not_fit_are_refused_by_flag(changes: dict[str, Any], message: str) -> None:
    PROVIDER.validate(qwen2_5_vl.Config(), LAYOUT, 4096)
    with pytest.raises(ValueError, match="--") as caught:
        PROVIDER.validate(dataclasses.replace(qwen2_5_vl.Config(), **changes), LAYOUT, 4096)
    assert message in str(caught.value)


def test_a_decoder_of_another_family_is_not_exported() -> None:
    for changes in ({"qk_layernorm": True}, {"add_qkv_bias": False}, {"kv_channels": 64, "mrope_section": (8, 12, 12)}):
        with pytest.raises(ValueError, match="Qwen2_5_VLForConditionalGeneration has a Qwen2 decoder|no Hugging Face"):
            PROVIDER.hf_config(dataclasses.replace(qwen2_5_vl.Config(), **changes))


def test_a_module_alone_takes_its_part_of_a_configuration() -> None:
    base = qwen2_5_vl.from_hf(published("3b"))
    language = hf_qwen_vl.module_sizes(published("7b"), LANGUAGE)
    assert language["hidden_size"] == 3584 and not any(name.startswith("vision_") for name in language)
    vision = PROVIDER.with_hf(base, published("32b"), VISION)
    assert vision == dataclasses.replace(base, vision_ffn_hidden_size=3456)
    text = {"model_type": "qwen2", **PUBLISHED["3b"][0], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 128000, "tie_word_embeddings": True}
    assert PROVIDER.computed_fields(PROVIDER.with_hf(base, text, LANGUAGE), LANGUAGE) == PROVIDER.computed_fields(
        base, LANGUAGE)


def test_an_image_becomes_a_grid_of_tokens() -> None:
    config = qwen2_5_vl.Config()
    grid = PROVIDER.token_grid(config, VISION, 756, 1036)
    assert (grid.rows, grid.columns, grid.frames) == (27, 37, 1)
    assert PROVIDER.num_image_tokens(config, VISION, 756, 1036) == grid.size
    with pytest.raises(ValueError, match="multiples of 28"):
        PROVIDER.num_image_tokens(config, VISION, 768, 1036)


def test_a_video_becomes_a_grid_in_time() -> None:
    config = qwen2_5_vl.Config()
    assert PROVIDER.video_grid(config, VISION, VideoSize(56, 84, 6, 0.5)) == TokenGrid(2, 3, 3, frame_step=2.0)
    assert count_tokens(PROVIDER, config, VISION, *VideoSize(56, 84, 6, 0.5)) == 18
    for size, message in ((VideoSize(56, 84, 5, 0.5), "a video of 5 frames: must be a multiple of"),
                          (VideoSize(56, 80, 6, 0.5), "multiples of 28"), (VideoSize(56, 84, 6), "0.0 seconds apart")):
        with pytest.raises(ValueError, match=message):
            PROVIDER.video_grid(config, VISION, size)
    with pytest.raises(ValueError, match="--image-token-id 9 --video-token-id 9: must differ"):
        PROVIDER.validate_sizes(dataclasses.replace(config, image_token_id=9, video_token_id=9))
