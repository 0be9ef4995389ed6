"""Qwen3-VL as plain data: configurations there and back, refused values, published sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mimo.grid.dry_run import bridge_width, total_parameters
from mimo.grid.layout import validate_layout
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, VideoSize
from mimo.registry import model_provider, provider_of
from providers import qwen3_vl
from providers.common.vision_language import VISION

PROVIDER = model_provider("qwen3_vl")
# Text, tower, tied: the published models. Compared with torchtitan/experiments/qwen3_vl of pytorch/torchtitan (2b, 8b,
# 30b-a3b, 235b-a22b) and with copies of config.json in public repositories (4b, 32b).
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
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


def published(name: str) -> dict[str, Any]:
    """A config.json as it is published, down to its spelling of the tower's type."""
    text, tower, tied = PUBLISHED[name]
    kind = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    return {
        "model_type": kind, "tie_word_embeddings": tied,
        "text_config": {"model_type": f"{kind}_text", "max_position_embeddings": 262144, "rope_theta": 5e6,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"}, **text},
        "vision_config": {"model_type": kind, "out_hidden_size": text["hidden_size"], **tower}}


def test_the_family_is_found_by_its_architecture() -> None:
    assert provider_of("Qwen3VLForConditionalGeneration") == "qwen3_vl"
    assert provider_of("Qwen3VLMoeForConditionalGeneration") == "qwen3_vl"
    assert qwen3_vl.from_hf(published("8b")) == qwen3_vl.Config()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_defaults_equal_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(kind).to_dict()
    size = full["vision_config"]["out_hidden_size"] = full["text_config"]["hidden_size"]
    assert qwen3_vl.from_hf({"model_type": kind, "vision_config": {"out_hidden_size": size}}) == qwen3_vl.from_hf(
        full | {"tie_word_embeddings": False})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_tensors_of_transformers(name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = qwen3_vl.from_hf(published(name))
    written = PROVIDER.hf_config(config)
    assert qwen3_vl.from_hf(written) == config
    loaded = transformers.AutoConfig.for_model(**published(name))
    assert qwen3_vl.from_hf(loaded.to_dict()) == config
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**written))
    theirs = set(model.state_dict()) - ({"lm_head.weight"} if loaded.tie_word_embeddings else set())
    ours: set[str] = set()
    for module in (VISION, LANGUAGE):
        found = PROVIDER.weight_map(config, module)
        ours |= {found.schemes[0].apply(hf) for rule in found.rules for hf in rule.hf}
    assert ours == theirs
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    counted = sum(total_parameters(PROVIDER.parameter_shapes(unpadded, module)) for module in (VISION, LANGUAGE))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("section", "change", "message"), [
    ("", {"model_type": "qwen2_5_vl"}, "model_type = 'qwen2_5_vl'"),
    ("", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("text_config", {"hidden_act": "gelu"}, "text_config.hidden_act = 'gelu'"),
    ("text_config", {"attention_bias": True}, "text_config.attention_bias = True"),
    ("text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type = 'yarn'"),
    ("text_config", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved = False"),
    ("vision_config", {"out_hidden_size": 3584}, "out_hidden_size = 3584 is not supported; supported: text_config.hid"),
    ("text_config", {"norm_topk_prob": False}, "text_config.norm_topk_prob = False"),
    ("vision_config", {"in_channels": 4}, "vision_config.in_channels = 4"),
    ("vision_config", {"hidden_act": "silu"}, "vision_config.hidden_act = 'silu'"),
    ("vision_config", {"deepstack_visual_indexes": [16, 8]}, "deepstack_visual_indexes = [16, 8]"),
    ("vision_config", {"temporal_patch_size": [2, 2]}, "temporal_patch_size = [2, 2]"),
    ("vision_config", {"rope_parameters": {"rope_theta": 100.0}}, "rope_parameters.rope_theta = 100.0"),
])
def test_values_that_the_model_cannot_reproduce_are_refused_by_key(section: str, change: dict[str, Any],
                                                                   message: str) -> None:
    config = published("30b-a3b" if "norm_topk_prob" in change else "8b")
    (config[section] if section else config).update(change)
    with pytest.raises(ValueError, match="--hf-config") as caught:
        qwen3_vl.from_hf(config)
    assert message in str(caught.value)


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


LAYOUT = Layout("disjoint", 2, (GridSpec(VISION),), GridSpec(LANGUAGE, offset=1))


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_layers": 2, "num_query_groups": 8}, "--vision-deepstack-layers 8 16 24: --num-layers 2 must be at least 3"),
    ({"vision_deepstack_layers": (8, 27)}, "--vision-deepstack-layers 8 27: needs numbers of layers in ascending"),
    ({"vision_num_position_embeddings": 2300}, "2300 is not a square; nearest: 2209 or 2304"),
    ({"mrope_section": (24, 20, 16)}, "--mrope-section 24 20 16: needs three numbers"),
    ({"mrope_section": (10, 27, 27)}, "have at most 21 for rows and 21 for columns"),
    ({"vision_hidden_size": 1184}, "heads of 74 channels"),
])
def test_sizes_that_do_not_fit_are_refused_by_flag(changes: dict[str, Any], message: str) -> None:
    validate_layout(LAYOUT, micro_batch_size=1, global_batch_size=1)
    PROVIDER.validate(qwen3_vl.Config(), LAYOUT, 4096)
    with pytest.raises(ValueError, match="--") as caught:
        PROVIDER.validate(dataclasses.replace(qwen3_vl.Config(), **changes), LAYOUT, 4096)
    assert message in str(caught.value)


def test_an_image_and_its_levels_on_the_bridge() -> None:
    config = qwen3_vl.Config()
    assert PROVIDER.num_image_tokens(config, VISION, 768, 1024) == 24 * 32
    assert bridge_width(PROVIDER, config, VISION) == 4 * 4096
    with pytest.raises(ValueError, match="multiples of 32"):
        PROVIDER.num_image_tokens(config, VISION, 768, 1008)


def test_a_temporal_patch_is_positioned_as_an_image() -> None:
    config = qwen3_vl.Config()
    assert PROVIDER.video_grid(config, VISION, VideoSize(64, 96, 2)) == PROVIDER.token_grid(config, VISION, 64, 96)
    with pytest.raises(ValueError, match="a video of 4 frames: the family has a placeholder for every 2 frames"):
        PROVIDER.video_grid(config, VISION, VideoSize(64, 96, 4, 0.5))
