"""The RADIO encoder as plain data: image sizes, checks, names of its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mimo.grid.spec import GridSpec
from mimo.weights.match import match_source
from mimo.weights.rules import WeightMap
from mimo.weights.safetensors_io import Catalog, SourceTensor
from providers.common.checks import Problems
from providers.common.vision import image_tokens
from providers.common.weights import RADIO, HeadMajor, radio_map
from providers.radio import RadioConfig, check_radio, check_radio_grid

DYNAMIC = RadioConfig(vision_dynamic_resolution=True)
WIDE = RadioConfig(vision_image_width=1024)
SMALL = RadioConfig(vision_num_layers=1)


def problems_of(config: RadioConfig, grid: GridSpec | None = None) -> list[str]:
    problems = Problems()
    check_radio(config, problems)
    if grid is not None:
        check_radio_grid(config, grid, problems)
    return problems.found


def test_the_defaults_fit() -> None:
    assert problems_of(RadioConfig(), GridSpec("vision", tp=8)) == problems_of(DYNAMIC) == problems_of(WIDE) == []


def test_tokens_of_an_image() -> None:
    assert image_tokens(RadioConfig(), 512, 512) == 256
    assert image_tokens(WIDE, 512, 1024) == WIDE.num_tokens == 512
    assert image_tokens(DYNAMIC, 32, 2048) == 64
    assert image_tokens(DYNAMIC, 96, 64) == 6
    with pytest.raises(ValueError, match="--vision-image-size 512, which takes 512 x 512"):
        image_tokens(RadioConfig(), 512, 480)
    for size in ((1024, 512), (512, 512), (1024, 1024)):
        with pytest.raises(ValueError, match="--vision-image-size 512 --vision-image-width 1024, which takes 512 x "):
            image_tokens(WIDE, *size)
    for size in ((48, 64), (64, 40), (0, 32)):
        with pytest.raises(ValueError, match="multiples of 32 "):
            image_tokens(DYNAMIC, *size)


@pytest.mark.parametrize("size", [(2080, 32), (32, 2080)])
def test_an_image_may_be_longer_than_the_position_grid(size: tuple[int, int]) -> None:
    assert image_tokens(DYNAMIC, *size) == 65


@pytest.mark.parametrize(("changes", "says"), [
    ({"vision_num_channels": 1}, "--vision-num-channels 1"),
    ({"vision_patch_size": 0}, "--vision-patch-size 0 must be at least 1"),
    ({"vision_norm_epsilon": -1e-6}, "--vision-norm-epsilon -1e-06 is not a number above 0"),
    ({"vision_class_token_len": -1}, "--vision-class-token-len -1"),
    ({"vision_image_size": 500}, "--vision-image-size 500 is not divisible by --vision-patch-size 16"),
    ({"vision_image_size": 528}, "--vision-pixel-shuffle 2 does not divide the 33 patches"),
    ({"vision_image_size": 4096}, "--vision-image-size 4096 is larger than --vision-max-image-size 2048"),
    ({"vision_image_width": 500}, "--vision-image-width 500 is not divisible by --vision-patch-size 16"),
    ({"vision_image_width": 528}, "does not divide the 33 patches a side of --vision-image-width 528 with"),
    ({"vision_image_width": 4096}, "--vision-image-width 4096 is larger than --vision-max-image-size 2048"),
    ({"vision_image_width": -512}, "--vision-image-width -512 must not be negative"),
    ({"vision_image_width": 1024, "vision_image_size": 528}, "33 patches a side of --vision-image-size 528 with"),
    ({"vision_image_width": 1024, "vision_dynamic_resolution": True},
     "--vision-image-width 1024 is for images of one size, but with --vision-dynamic-resolution"),
    ({"vision_max_image_size": 1000, "vision_image_size": 512}, "--vision-max-image-size 1000 is not divisible"),
    ({"vision_num_attention_heads": 12}, "--vision-hidden-size 1280 is not divisible by --vision-num-attention-heads"),
])
def test_sizes_that_do_not_fit_are_named(changes: dict[str, int], says: str) -> None:
    found = problems_of(replace(RadioConfig(), **changes))
    assert len(found) == 1 and says in found[0], found


def test_with_dynamic_resolution_the_fixed_size_has_no_effect() -> None:
    assert problems_of(replace(DYNAMIC, vision_image_size=500)) == []


def test_grids_that_do_not_fit_are_named() -> None:
    (stages,) = problems_of(RadioConfig(), GridSpec("vision", pp=2))
    assert "--encoder-pp 2" in stages and "use --encoder-pp 1" in stages
    heads, inner, projector = problems_of(RadioConfig(), GridSpec("vision", tp=3))
    assert "--vision-num-attention-heads 16" in heads and "--encoder-tp 3" in heads
    assert "--vision-ffn-hidden-size 5120" in inner and "--projector-hidden-size 20480" in projector


# Weights

def test_heads_follow_each_other_in_the_megatron_tensor() -> None:
    rows = torch.arange(12)[:, None].expand(12, 2)  # three parts of two heads with two channels each
    convert = HeadMajor(2, 2)
    fused = convert.to_megatron([rows])
    assert fused[:, 0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert torch.equal(convert.to_hf(fused)[0], rows)
    assert torch.equal(convert.to_megatron([rows[:, 0]]), fused[:, 0])
    for shape in ((11, 2), ()):
        with pytest.raises(ValueError, match="does not have 12 rows"):
            convert.to_megatron([torch.zeros(shape)])


def problems_with(names: set[str], weight_map: WeightMap) -> list[str]:
    entry = SourceTensor((1,), torch.float32, "F32", "model.safetensors")
    _, problems = match_source(Catalog("folder", dict.fromkeys(sorted(names), entry), {}), {"vision": weight_map}, {})
    return problems


def names_of(config: RadioConfig) -> set[str]:
    return {name for rule in radio_map(config, "radio").rules for name in rule.hf}


def test_other_contents_of_a_checkpoint_are_ignored() -> None:
    extra = {RADIO + name for name in ("summary_idxs", "input_conditioner.norm_mean", "input_conditioner.norm_std",
                                       "model.patch_generator.video_embedder.weight")}
    assert problems_with(names_of(SMALL) | extra | {"sound_projection.linear1.weight"}, radio_map(SMALL, "radio")) == []


def test_tensors_that_change_the_features_are_not_ignored() -> None:
    for name in ("model.blocks.0.ls1.gamma", "feature_normalizer.mean", "model.norm.weight"):
        config = replace(SMALL, vision_final_layernorm=False)
        (line,) = problems_with(names_of(config) | {RADIO + name}, radio_map(config, "radio"))
        assert line.startswith(f"not used: {RADIO}{name} ")


def test_a_checkpoint_without_the_last_norm_is_refused_by_a_model_with_it() -> None:
    without = names_of(replace(SMALL, vision_final_layernorm=False))
    lines = [line.split(" (")[0] for line in problems_with(without, radio_map(SMALL, "radio"))]
    assert lines == [f"missing: {RADIO}model.norm.{kind}" for kind in ("weight", "bias")]


def test_an_encoder_of_its_own_has_other_names_and_no_projector() -> None:
    own = {name.removeprefix("vision_model.") for name in names_of(SMALL) if name.startswith("vision_model.")}
    assert problems_with(own | {"radio_model.summary_idxs"}, radio_map(SMALL, "radio")) == []
    (line,) = problems_with(own - {"radio_model.model.blocks.0.attn.qkv.weight"}, radio_map(SMALL, "radio"))
    assert line.startswith("missing: radio_model.model.blocks.0.attn.qkv.weight (")
