"""Images of any size, packed: each gives the same tokens and gradients as alone, on every layout of the encoder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.grid.dry_run import total_parameters
from mimo.grid.spec import GridSpec
from mimo.model.radio import interpolate_positions, pixel_shuffle
from mimo.protocols import LANGUAGE
from providers import mock
from tests.support import equality, hf_families, packing
from tests.support.marks import fast_only
from tests.support.packing import Outcome
from tests.support.spawn import WorkerPool

TOLERANCE = 3e-6
VISION = """--model-provider mock --num-query-groups 2 --vision-patch-size 8 --vision-num-layers 2
--vision-hidden-size 32 --vision-num-attention-heads 4 --vision-ffn-hidden-size 48 --vision-final-layernorm
--vision-patch-bias --no-vision-class-token --image-token-id 95"""
DYNAMIC = f"{VISION} --vision-dynamic-resolution --vision-image-size 32"
# name -> (flags, height and width of the images)
MODELS = {"patches": (DYNAMIC, ((16, 16), (8, 24), (16, 8), (24, 16))),
          "pixel-shuffle": (f"{DYNAMIC} --vision-pixel-shuffle 2", ((16, 16), (16, 48), (32, 16), (32, 48)))}
# name -> (ranks, flags)
LAYOUTS = {"one-process": (1, "--layout colocated"), "encoder-tp2": (3, "--encoder-tp 2"),
           "encoder-pp2": (3, "--encoder-pp 2"), "two-lanes-of-one-encoder": (3, "--llm-dp 2"),
           "two-encoders": (4, "--encoder-dp 2 --llm-dp 2"),
           "colocated-encoder-tp2": (2, "--layout colocated --encoder-tp 2 --llm-dp 2")}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[..., Outcome]:
    """The samples one by one on one process, computed once."""

    @functools.cache
    def run(flags: str, sizes: tuple[tuple[int, int], ...]) -> Outcome:
        layout = (*flags.split(), "--layout", "colocated")
        (outcome,) = pool.run(packing.run, layout, 1, False, sizes, world_size=1)
        return outcome

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_packed_images_equal_each_sample_alone(pool: WorkerPool, alone: Any, model: str, layout: str) -> None:
    (flags, sizes), (ranks, grids) = MODELS[model], LAYOUTS[layout]
    outcomes = pool.run(packing.run, (*flags.split(), *grids.split()), ranks, True, sizes, world_size=ranks)
    found = packing.differences(alone(flags, sizes), outcomes, TOLERANCE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("factor", "layout"), fast_only(
    [(1, "encoder-tp2"), (1, "encoder-pp2")],
    itertools.product([1, 2], ["one-process", "encoder-tp2", "encoder-pp2"])))
def test_images_of_one_size_equal_the_unpacked_encoder(pool: WorkerPool, alone: Any, factor: int, layout: str) -> None:
    side, (ranks, grids) = 16 * factor, LAYOUTS[layout]
    sizes, shuffle = ((side, side),) * 4, f"--vision-image-size {side} --vision-pixel-shuffle {factor}"
    expected = alone(f"{VISION} {shuffle}", sizes)
    for flags in (f"{VISION} {shuffle}", f"{DYNAMIC} {shuffle}"):
        outcomes = pool.run(packing.run, (*flags.split(), *grids.split()), ranks, True, sizes, world_size=ranks)
        found = packing.differences(expected, outcomes, TOLERANCE)
        assert not found, "\n".join([flags, *found])


@pytest.mark.slow
def test_frozen_encoder_on_two_stages(pool: WorkerPool, alone: Any) -> None:
    flags, sizes = MODELS["pixel-shuffle"]
    frozen = f"{flags} --freeze vision"
    outcomes = pool.run(packing.run, (*frozen.split(), "--encoder-pp", "2"), 3, True, sizes, world_size=3)
    found = packing.differences(alone(frozen, sizes), outcomes, TOLERANCE)
    assert not found, "\n".join(found)


def test_training_on_both_pipelines_equals_one_process(pool: WorkerPool) -> None:
    # Batches from the loader, text-only ones among them; three steps.
    flags = ("--vision-dynamic-resolution", "--no-vision-class-token", "--vision-image-size", "32",
             "--vision-pixel-shuffle", "2", "--mock-image-size", "32")
    (oracle,) = pool.run(equality.run_oracle, flags, world_size=1)
    assert oracle.batch_facts["text_only"] >= 2
    grids = ("--encoder-pp", "2", "--llm-pp", "2")
    equality.assert_equal(oracle, pool.run(equality.run_layout, (*grids, *flags), 4, world_size=4))


# The encoder by itself

CONFIG = mock.Config(
    vision_image_size=32, vision_patch_size=8, vision_hidden_size=32, vision_num_attention_heads=4,
    vision_ffn_hidden_size=48, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
    ffn_hidden_size=48, vocab_size=96, image_token_id=95, vision_class_token=False, vision_dynamic_resolution=True,
    vision_pixel_shuffle=2)


def run_encoder(rank: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Tokens of images of these sizes packed and each alone, with the module's parameters and inputs checked."""
    from mimo.data.encoder_inputs import PatchOrder, packed_patches
    from tests.support import provider_cases as cases

    with cases.grids_of(GridSpec("vision"), GridSpec(LANGUAGE)) as grids:
        module = cases.build_module_of(grids, CONFIG, "vision", 16)
    images = [cases.draw(3, *size, seed=number).numpy() for number, size in enumerate(sizes)]
    inputs = packed_patches(images, sizes, PatchOrder(8), torch.float32)
    packed = inputs["packed_seq_params"]
    before = {"pixel_values": inputs["pixel_values"].clone(), "imgs_sizes": inputs["imgs_sizes"].copy(),
              "cu_seqlens": packed.cu_seqlens.clone()}
    together = module(inputs).detach()
    alone = [module(packed_patches([image], [size], PatchOrder(8), torch.float32)).detach()
             for image, size in zip(images, sizes, strict=True)]
    after = {"pixel_values": inputs["pixel_values"], "imgs_sizes": inputs["imgs_sizes"],
             "cu_seqlens": packed.cu_seqlens}
    errors = {}
    for name, change in {"patches": {"pixel_values": inputs["pixel_values"][:, 1:]},
                         "sizes": {"imgs_sizes": inputs["imgs_sizes"] * 2},
                         "images": {"pixel_values": torch.zeros(2, 3, 32, 32)}}.items():
        with pytest.raises(ValueError, match="pixel_values has shape") as caught:
            module(inputs | change)
        errors[name] = str(caught.value)
    return {"together": together, "alone": torch.cat(alone), "errors": errors, "keys": list(inputs),
            "kept": all(before[key].tolist() == after[key].tolist() for key in before),
            "parameters": sum(parameter.numel() for parameter in module.parameters())}


@pytest.mark.slow
def test_encoder_keeps_images_apart_and_its_inputs_as_they_were(pool: WorkerPool) -> None:
    sizes = [(16, 48), (32, 32), (48, 16), (16, 16)]
    (found,) = pool.run(run_encoder, sizes, world_size=1)
    assert found["together"].shape == (3 + 4 + 3 + 1, 32)
    torch.testing.assert_close(found["together"], found["alone"], rtol=1e-5, atol=1e-6)
    assert found["kept"] and found["keys"] == ["pixel_values", "imgs_sizes", "packed_seq_params"]
    assert "[12, 16, 12, 4] patches" in found["errors"]["patches"]
    assert found["parameters"] == total_parameters(mock.provider.parameter_shapes(CONFIG, "vision"))


@pytest.mark.slow
def test_positions_are_interpolated_between_patch_centres() -> None:
    # By the formula: sample i of n lies at (i + 0.5) * side / n - 0.5, clamped to the grid.
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, columns, square = 2, 7, weight.view(3, 3, 5)

    def mix(count: int) -> torch.Tensor:
        found = torch.zeros(count, 3, dtype=torch.float64)
        for place in range(count):
            at = min(max((place + 0.5) * 3 / count - 0.5, 0.0), 2.0)
            low = min(int(at), 1)
            found[place, low], found[place, low + 1] = 1 - (at - low), at - low
        return found

    expected = torch.einsum("yr,xc,rch->yxh", mix(rows), mix(columns), square).reshape(rows * columns, 5)
    torch.testing.assert_close(interpolate_positions(weight, (rows, columns)), expected)
    assert interpolate_positions(weight, (3, 3)) is weight
    halves = weight.to(torch.bfloat16)
    rounded = interpolate_positions(halves, (rows, columns))
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded, interpolate_positions(halves.double(), (rows, columns)).to(torch.bfloat16))


@pytest.mark.slow
def test_neighbouring_patches_become_one_token() -> None:
    names = torch.arange(2 * 6).view(12, 1)  # two rows of six patches
    assert pixel_shuffle(names, (2, 6), 2).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert pixel_shuffle(torch.stack([names, names + 12]), (2, 6), 2)[1].tolist()[2] == [16, 17, 22, 23]
    assert pixel_shuffle(names, (2, 6), 1) is names


# Hugging Face weights

def logits_of_siglip(rank: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Logits by transformers and by this encoder with dynamic resolution, of images of the tower's own size."""
    expected = hf_families.save_hf(rank, "siglip-qwen3", folder)
    flags = ("--layout", "colocated", "--vision-dynamic-resolution", "--mock-image-size", "16")
    return expected, hf_families.logits_of(rank, "siglip-qwen3", folder, flags, 1)


@pytest.mark.slow
def test_weights_of_a_siglip_load(pool: WorkerPool, tmp_path: Path) -> None:
    ((expected, found),) = pool.run(logits_of_siglip, str(tmp_path), world_size=1)
    assert found.keys() == expected.keys()
    for key, logits in found.items():
        torch.testing.assert_close(logits[:, : hf_families.VOCAB_SIZE], expected[key], rtol=1e-4, atol=1e-4)
