"""The Nemotron MoE VLM providers as plain data: variants, patterns, checks against layouts, planning shapes, stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mimo.config.cli import parse, to_toml, without_training_stage
from mimo.config.validate import validate
from mimo.grid.dry_run import dry_run_report, total_parameters
from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE
from mimo.registry import MODEL_PROVIDERS, model_provider
from providers.common.checks import Problems
from providers.common.hybrid import HybridConfig, check_hybrid
from providers.common.hybrid_build import with_stages
from providers.nemotron_moe_vlm import PATTERN_54, Config, ConfigTiny
from tests.support.fitting import layout, problems_of

PROVIDER = model_provider("nemotron-moe-vlm-20l")
TINY = model_provider("nemotron-moe-vlm-tiny")
VARIANTS = [name for name in MODEL_PROVIDERS if name.startswith("nemotron-moe-vlm")]


def test_variants_have_the_layers_that_their_names_say() -> None:
    assert set(VARIANTS) == {"nemotron-moe-vlm-20l", "nemotron-moe-vlm-54l", "nemotron-moe-vlm-tiny"}
    assert Config().num_layers == 20 and Config().counts == {"M": 9, "E": 8, "*": 3}
    assert len(PATTERN_54) == 54 and PATTERN_54.count("E") == 27


def test_the_20_layer_language_model_has_its_published_sizes() -> None:
    config = Config()
    assert (config.mamba_inner_size, config.mamba_conv_size, sum(config.mamba_in_proj_rows)) == (4096, 6144, 10304)
    moe = 128 * 2 * 1856 * 2688 + 2 * 3712 * 2688 + 128 * 2688 + 2688
    mamba = 10304 * 2688 + 6144 * 5 + 3 * 64 + 4096 + 4096 * 2688 + 2688
    attention = (32 + 2 * 8) * 128 * 2688 + 32 * 128 * 2688 + 2688
    expected = 8 * moe + 9 * mamba + 3 * attention + 2 * 131072 * 2688 + 2688
    assert total_parameters(PROVIDER.parameter_shapes(config, LANGUAGE)) == expected


@pytest.mark.parametrize(("change", "grids", "message"), [
    ({"hidden_dropout": 2.0}, layout(), "--hidden-dropout 2.0 is not in [0, 1)"),
    ({}, layout(pp=4), "--hybrid-layer-pattern MEM*-E has 6 layers, not divisible by --llm-pp 4; --llm-pp that fit: "
                       "1, 2, 3, 6"),
    ({}, layout(dp=3, ep=3), "--num-experts 8 is not divisible by --llm-ep 3"),
    ({"mamba_num_groups": 1}, layout(tp=2), "--mamba-num-groups 1 is not divisible by --llm-tp 2"),
    ({}, layout(cp=16), "--mamba-num-heads 8 is not divisible by --llm-tp 1 * --llm-cp 16"),
    ({"mamba_num_groups": 8, "mamba_num_heads": 24}, layout(cp=3), "--mamba-num-groups 8 over --llm-tp 1 * --llm-cp 3"),
    ({"hybrid_layer_pattern": "M*"}, layout(dp=2, ep=2), "--llm-ep 2 and --llm-expt-tp 1 need layers with experts"),
    ({"hybrid_layer_pattern": "M*-", "moe_aux_loss_coeff": 0.5}, layout(), "--moe-aux-loss-coeff 0.5 needs a layer"),
    ({"mtp_loss_scaling_factor": 3.0}, layout(),
     "--mtp-loss-scaling-factor 3.0 needs a depth of multi-token prediction in --hybrid-layer-pattern"),
    ({}, layout({"pp": 2}), "--encoder-pp 2"),
    ({"moe_router_topk": 9}, layout(), "--moe-router-topk 9 exceeds --num-experts 8"),
    ({"mamba_num_groups": 3}, layout(), "--mamba-num-heads 8 is not divisible by --mamba-num-groups 3"),
    ({"hybrid_layer_pattern": "MEX*"}, layout(),
     "--hybrid-layer-pattern MEX*: symbol 'X' at position 3 is unknown; layers are M (Mamba-2)"),
    ({"hybrid_layer_pattern": ""}, layout(), "--hybrid-layer-pattern '' has no layers"),
    ({"hybrid_layer_pattern": "/ME"}, layout(), "--hybrid-layer-pattern '/ME' has no layers"),
    ({"hybrid_layer_pattern": "ME/*E/M"}, layout(),
     "every depth of multi-token prediction has the same layers, at least one; these are '*E', 'M'"),
    ({"hybrid_layer_pattern": "ME/"}, layout(), "these are ''"),
    ({"image_token_id": 512}, layout(), "--image-token-id 512 must lie between 0 and --vocab-size 512 less one"),
])
def test_sizes_that_a_layout_cannot_hold_are_refused(change: dict, grids: Layout, message: str) -> None:
    assert message in "\n".join(problems_of(TINY, dataclasses.replace(ConfigTiny(), **change), grids))


@pytest.mark.parametrize("change", [
    {"hybrid_layer_pattern": "M*-"}, {"hybrid_layer_pattern": "M*/*E", "mtp_loss_scaling_factor": 3.0},
    # A loss that is off, and sizes of a config.json, which always has some of experts.
    {"hybrid_layer_pattern": "M*-", "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"},
    {"hybrid_layer_pattern": "M*-", "num_experts": 7, "hf_config": "given"}])
def test_flags_that_have_an_effect_or_say_that_they_have_none_are_taken(change: dict) -> None:
    problems = Problems()
    check_hybrid(dataclasses.replace(ConfigTiny(), **change), problems)
    assert not problems.found


def test_images_of_one_size_need_not_be_square() -> None:
    config = ConfigTiny(vision_dynamic_resolution=False, vision_image_size=16, vision_image_width=48)
    spec = TINY.token_spec(config)
    assert spec.image_shape == (16, 48) and not spec.packs_patches
    assert TINY.num_image_tokens(config, "vision", *spec.image_shape) == 3
    TINY.validate(config, layout(), 64)
    wide = dataclasses.replace(config, vision_image_width=256, vision_image_size=64)
    (line,) = problems_of(TINY, wide, layout())
    assert ("an image becomes 64 tokens (--vision-image-size 64 --vision-image-width 256, --vision-patch-size 8, "
            "--vision-pixel-shuffle 2), which leaves no room in --seq-length 64") in line
    assert TINY.token_spec(ConfigTiny()).image_shape == (0, 0)
    plan = dry_run_report(run := parse([
        "--model-provider", "nemotron-moe-vlm-tiny", "--dataset-provider", "mock", "--no-vision-dynamic-resolution",
        "--vision-image-size", "16", "--vision-image-width", "48", "--world-size", "2", "--dry-run"]),
        validate(run, 2), TINY)
    assert "(one 16x48 image per sample = 3 tokens, hidden size 64, bf16)" in plan


def test_stages_freeze_their_parts(tmp_path: Path) -> None:
    flags = ["--model-provider", "nemotron-moe-vlm-tiny", "--dataset-provider", "mock"]
    assert parse([*flags, "--training-stage", "stage1"]).model.frozen == {"vision", "language"}
    assert not parse([*flags, "--training-stage", "stage2"]).model.frozen
    assert parse([*flags, "--freeze", "vision"]).model.frozen == {"vision"}
    for own in ("vision", "vision,language"):
        assert parse([*flags, "--training-stage", "stage2", "--freeze", own]).model.frozen == set(own.split(","))
    file = tmp_path / "run_config.toml"
    for own in ("", "vision"):  # what a stage freezes is not in the file of its run, so that the next stage trains it
        stage = ["--training-stage", "stage2" if own else "stage1", *(["--freeze", own] if own else [])]
        file.write_text(to_toml(without_training_stage(parse([*flags, *stage]))))
        assert parse(["--config", str(file), "--training-stage", "stage2"]).model.freeze == own
        assert parse(["--config", str(file)]) == parse([*flags, *stage])
    same = parse([*flags, "--training-stage", "stage1", "--freeze", "vision,language"])
    assert same.model.frozen == {"vision", "language"}
    for other in ("projector", "vision"):
        said = f"--freeze {other} with --training-stage stage1, which freezes language,vision: give one of them"
        with pytest.raises(ValueError, match=said):
            parse([*flags, "--training-stage", "stage1", "--freeze", other])


def test_patterns_are_cut_into_equal_stages() -> None:
    assert with_stages("MEM*-E/*E", 3) == "ME|M*|-E/*E"
    assert with_stages("MEM*", 1) == "MEM*"


def test_mtp_layers_are_counted_beside_the_decoder() -> None:
    config = HybridConfig(hybrid_layer_pattern="MEM*/*E/*E")
    assert (config.layers, config.mtp_layers, config.num_mtp_depths, config.num_layers) == ("MEM*", "*E", 2, 4)
    assert HybridConfig(hybrid_layer_pattern="MEM*").mtp_layers == ""
