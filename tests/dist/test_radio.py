"""The RADIO encoder against its published definition, packed and not, split over ranks, frozen; and its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ParameterShape
from providers import llava
from providers.common.checks import Problems
from providers.common.decoder import DecoderConfig, check_decoder_grid, decoder_shapes
from providers.common.vision import image_tokens
from providers.radio import RadioConfig, check_radio, check_radio_grid, radio_shapes
from tests.support import packing, weights
from tests.support.spawn import WorkerPool

if TYPE_CHECKING:
    import numpy as np

VISION, ENCODER = "vision", "radio"
Size = tuple[int, int]


@dataclass(frozen=True)
class Config(RadioConfig, DecoderConfig):
    """Model family: a small RADIO, a small decoder."""

    vision_image_size: int = 64
    vision_patch_size: int = 8
    vision_hidden_size: int = 32
    vision_num_layers: int = 2
    vision_num_attention_heads: int = 4
    vision_ffn_hidden_size: int = 48
    vision_class_token_len: int = 3
    vision_max_image_size: int = 128
    projector_hidden_size: int = 40
    num_layers: int = 2
    hidden_size: int = 24
    num_attention_heads: int = 4
    num_query_groups: int = 2
    ffn_hidden_size: int = 48
    vocab_size: int = 96
    image_token_id: int = 95
    hf_config: str = ""


class RadioProvider(llava.LlavaProvider):
    Config = Config
    hf_architectures = ()

    def validate(self, config: Config, layout: Layout, seq_length: int) -> None:
        problems = Problems()
        check_radio(config, problems)
        if not problems.found:
            check_decoder_grid(config, layout.language, seq_length, problems)
            for grid in layout.encoders:
                check_radio_grid(config, grid, problems)
        problems.report()

    def num_image_tokens(self, config: Config, module: str, height: int, width: int) -> int:
        return image_tokens(config, height, width)

    def parameter_shapes(self, config: Config, module: str) -> list[ParameterShape]:
        return decoder_shapes(config) if module == LANGUAGE else radio_shapes(config, config.hidden_size)

    def encoder_spec(self, config: Config, module: str, context: Any) -> Any:
        from providers.common.build import radio_spec

        return radio_spec(config, ENCODER, config.hidden_size, context)

    def weight_map(self, config: Config, module: str) -> Any:
        from providers.common.weights import radio_map

        return super().weight_map(config, module) if module == LANGUAGE else radio_map(config, ENCODER)

    def hf_config(self, config: Config) -> dict[str, Any]:
        return {"architectures": ["NemotronH_Nano_VL_V2"]}


provider = RadioProvider()


# Inside a worker

def build(grids: Any, config: Config, recompute: str = "none") -> Any:
    """This rank's vision module, with parameters that all matter."""
    from mimo.platform import current_platform
    from tests.support import provider_cases as cases

    current_platform().seed(7, tp_rank=0, ep_rank=0, expt_tp_rank=0)
    context = dataclasses.replace(cases.context_of(grids, VISION, 64), recompute=recompute)
    spec = provider.encoder_spec(config, VISION, context)
    module = spec.module.from_spec(spec, is_first_stage=True, is_last_stage=True)
    cases.randomize(module)
    with torch.no_grad():
        module.encoder.position_embeddings.copy_(cases.draw(*module.encoder.position_embeddings.shape, seed=21))
    return module


def inputs_of(config: Config, sizes: Sequence[Size]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Random images of these sizes, and the encoder's inputs."""
    from mimo.data.encoder_inputs import PatchOrder, packed_patches, whole_images
    from tests.support import provider_cases as cases

    images = [cases.draw(3, *size, seed=30 + number).numpy() for number, size in enumerate(sizes)]
    if config.vision_dynamic_resolution:
        return images, packed_patches(images, sizes, PatchOrder(config.vision_patch_size), torch.float32)
    return images, whole_images(images, torch.float32)


def hf_weights(module: Any, config: Config, groups: Any) -> dict[str, torch.Tensor]:
    """Return the module's tensors under their Hugging Face names, on one process."""
    from mimo.weights.match import module_pieces

    pieces = {piece.name: piece.tensor for piece in module_pieces(module, groups)}
    found = {}
    for rule in provider.weight_map(config, VISION).rules:
        found |= dict(zip(rule.hf, rule.convert.to_hf(pieces.pop(rule.megatron)), strict=True))
    assert not pieces, f"no rule for {sorted(pieces)}"
    return found


def published_forward(weights: dict[str, torch.Tensor], config: Config, image: np.ndarray) -> torch.Tensor:
    """Language tokens `[tokens, hidden_size]` of one image `[3, height, width]`, in float64.

    Written from the published definitions: `ViTPatchGenerator` of RADIO, timm's pre-norm `Block`, and `pixel_shuffle`
    (version 2) and `mlp1` of `NemotronH_Nano_VL_V2`.
    """
    weights = {name: value.double() for name, value in weights.items()}
    radio, patch, (_, height, width) = "vision_model.radio_model.model.", config.vision_patch_size, image.shape
    rows, columns, hidden = height // patch, width // patch, config.vision_hidden_size

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (hidden,), weights[name + ".weight"], weights[name + ".bias"],
                            config.vision_norm_epsilon)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    # Patches, row by row, each flattened as (channel, row, column).
    pixels = torch.from_numpy(image).double()
    patches = torch.stack([pixels[:, y:y + patch, x:x + patch].flatten()
                           for y in range(0, height, patch) for x in range(0, width, patch)])
    x = linear(patches, radio + "patch_generator.embedder")
    # Positions: the square grid to the longer side, then the window of the image.
    side, longer = config.vision_max_image_size // patch, max(rows, columns)
    positions = weights[radio + "patch_generator.pos_embed"].reshape(1, side, side, hidden).permute(0, 3, 1, 2)
    positions = F.interpolate(positions, size=(longer, longer), mode="bilinear", align_corners=False)
    x = x + positions[0, :, :rows, :columns].flatten(1).t()
    num_skip = 0
    if config.vision_class_token_len:
        class_token = weights[radio + "patch_generator.cls_token.token"]
        x, num_skip = torch.cat([class_token, x]), len(class_token)
    heads = config.vision_num_attention_heads
    for layer in range(config.vision_num_layers):
        block = f"{radio}blocks.{layer}."
        qkv = linear(norm(x, block + "norm1"), block + "attn.qkv").reshape(len(x), 3, heads, hidden // heads)
        q, k, v = qkv.permute(1, 2, 0, 3)
        scores = (q @ k.transpose(1, 2) / (hidden // heads) ** 0.5).softmax(-1)
        x = x + linear((scores @ v).transpose(0, 1).reshape(len(x), hidden), block + "attn.proj")
        inner = F.gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1"),
                       approximate="tanh" if config.vision_hidden_act == "gelu_tanh" else "none")
        x = x + linear(inner, block + "mlp.fc2")
    if config.vision_final_layernorm:
        x = norm(x, radio + "norm")
    # pixel_shuffle as Hugging Face writes it, one view and permutation after the other.
    factor = config.vision_pixel_shuffle
    x = x[num_skip:].reshape(1, rows, columns, hidden)
    x = x.view(1, rows, columns // factor, hidden * factor).permute(0, 2, 1, 3).contiguous()
    x = x.view(1, columns // factor, rows // factor, hidden * factor**2).permute(0, 2, 1, 3)
    x = x.reshape(rows // factor * (columns // factor), hidden * factor**2)
    x = x * (x.square().mean(-1, keepdim=True) + config.projector_norm_epsilon).rsqrt() * weights["mlp1.0.weight"]
    return linear(F.relu(linear(x, "mlp1.1")) ** 2, "mlp1.3")


TOLERANCE = 1e-5
SMALL = Config()
WIDE = dataclasses.replace(SMALL, vision_image_size=32, vision_image_width=96)
DYNAMIC = dataclasses.replace(SMALL, vision_dynamic_resolution=True)
# Wide, square, high, of one token, as large as the position grid; one size twice. LONGER ones go beyond that grid.
SIZES = ((32, 96), (64, 64), (96, 32), (16, 16), (128, 128), (32, 96))
LONGER = ((32, 224), (160, 48), (144, 144), (32, 64))
MODELS: dict[str, tuple[Config, tuple[Size, ...]]] = {
    "fixed": (SMALL, ((64, 64),) * 3),
    "fixed-at-the-position-grid": (dataclasses.replace(SMALL, vision_image_size=128), ((128, 128),)),
    "fixed-wide": (WIDE, ((32, 96),) * 3),
    "fixed-high": (dataclasses.replace(SMALL, vision_image_size=96, vision_image_width=16), ((96, 16),) * 2),
    "fixed-as-wide-as-the-position-grid": (
        dataclasses.replace(SMALL, vision_image_width=128, vision_class_token_len=0, vision_pixel_shuffle=4),
        ((64, 128),) * 2),
    "dynamic": (DYNAMIC, SIZES),
    "dynamic-beyond-the-position-grid": (DYNAMIC, LONGER),
    "dynamic-without-class-token-and-last-norm": (
        dataclasses.replace(DYNAMIC, vision_class_token_len=0, vision_final_layernorm=False, vision_pixel_shuffle=1),
        ((8, 24), (24, 16))),
    "dynamic-tanh": (dataclasses.replace(DYNAMIC, vision_hidden_act="gelu_tanh"), SIZES[:2]),
}


def run_model(rank: int, config: Config, sizes: tuple[Size, ...]) -> dict[str, Any]:
    """Tokens by the module, together, again and image by image, and by the published definition."""
    from tests.support import provider_cases as cases

    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        module = build(grids, config)
        weights_of = hf_weights(module, config, grids.collections[VISION])
    images, inputs = inputs_of(config, sizes)
    packed = inputs.get("packed_seq_params")
    before = None if packed is None else (packed.cu_seqlens.clone(), packed.max_seqlen, inputs["imgs_sizes"].copy())
    together, again = module(inputs).detach(), module(inputs).detach()
    kept = packed is None or (torch.equal(packed.cu_seqlens, before[0]) and packed.max_seqlen == before[1]
                              and bool((inputs["imgs_sizes"] == before[2]).all()))
    first = module(inputs_of(config, sizes[:1])[1]).detach()
    expected = [published_forward(weights_of, config, image) for image in images]
    return {"together": together, "again": again, "first": first, "expected": torch.cat(expected), "kept": kept,
            "counts": [len(tokens) for tokens in expected]}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_published_definition(pool: WorkerPool, name: str) -> None:
    config, sizes = MODELS[name]
    (found,) = pool.run(run_model, config, sizes, world_size=1)
    assert found["counts"] == [provider.num_image_tokens(config, VISION, *size) for size in sizes]
    scale = found["expected"].abs().max()
    torch.testing.assert_close(found["together"].double(), found["expected"], rtol=0, atol=float(TOLERANCE * scale))
    assert torch.equal(found["together"], found["again"]) and found["kept"]
    first = found["together"][: found["counts"][0]]
    torch.testing.assert_close(found["first"], first, rtol=0, atol=float(TOLERANCE * scale))


def gradients(rank: int, config: Config, sizes: tuple[Size, ...], recompute: str) -> dict[str, torch.Tensor]:
    """Tokens and gradients of a random linear loss, twice on the same inputs."""
    from tests.support import provider_cases as cases

    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        module = build(grids, config, recompute)
    module.train()
    _, inputs = inputs_of(config, sizes)
    for _ in range(2):
        tokens = module(inputs)
        (tokens * cases.draw(*tokens.shape, seed=5)).sum().backward()
    return {"tokens": tokens.detach()} | {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_give_the_same_gradients(pool: WorkerPool, recompute: str) -> None:
    (expected,) = pool.run(gradients, DYNAMIC, SIZES[:4], "none", world_size=1)
    (found,) = pool.run(gradients, DYNAMIC, SIZES[:4], recompute, world_size=1)
    assert found.keys() == expected.keys() and all(value is not None for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


# Split over ranks

def compare_tensor_parallel(rank: int, config: Config, sizes: tuple[Size, ...]) -> dict[str, float]:
    """Errors of tokens and of every gradient on two tensor-parallel ranks against one."""
    from tests.support import provider_cases as cases

    _, inputs = inputs_of(config, sizes)

    def run(module: Any) -> torch.Tensor:
        tokens = module(inputs)
        (tokens * cases.draw(*tokens.shape, seed=5)).sum().backward()
        return tokens.detach()

    with cases.grids_of(GridSpec(VISION, dp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        whole = build(grids, config)
        expected = run(whole)
    full = dict(whole.named_parameters())
    with cases.grids_of(GridSpec(VISION, tp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        split = build(grids, config)
        with torch.no_grad():
            for name, part in split.named_parameters():
                part.copy_(cases.shard_of(name, full[name], part, 1, rank))
        errors = {"tokens": cases.relative_error(run(split), expected)}
        for name, part in split.named_parameters():
            errors[name] = cases.relative_error(part.grad, cases.shard_of(name, full[name].grad, part, 1, rank))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "fixed-wide", "dynamic"])
def test_two_tensor_parallel_ranks_equal_one(pool: WorkerPool, name: str) -> None:
    for errors in pool.run(compare_tensor_parallel, *MODELS[name], world_size=2):
        assert {key: error for key, error in errors.items() if not error < TOLERANCE} == {}
        assert {"encoders.radio.class_token", "encoders.radio.position_embeddings"} <= errors.keys()


PROVIDER = ("--model-provider", "tests.dist.test_radio:provider", "--hidden-size", "32", "--vision-dynamic-resolution",
            "--vision-max-image-size", "64")
# name -> (ranks, flags)
LAYOUTS = {
    "one-process": (1, "--layout colocated"),
    "encoder-tp2-two-lanes": (4, "--encoder-tp 2 --llm-dp 2"),
    "frozen": (2, "--freeze vision"),
    "windows": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 1"),
    "windows-two-lanes-chunks": (
        4, "--layout colocated --encoder-dp 4 --llm-dp 2 --llm-pp 2 --encoder-chunk 1"),
    "windows-frozen": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --freeze vision"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_packed_images_equal_each_sample_alone(pool: WorkerPool, layout: str) -> None:
    ranks, grids = LAYOUTS[layout]
    sizes = ((16, 32), (32, 32), (32, 16), (16, 16))
    frozen = ("--freeze", "vision") if "freeze" in grids else ()
    (expected,) = pool.run(packing.run, (*PROVIDER, *frozen, "--layout", "colocated"), 1, False, sizes, world_size=1)
    outcomes = pool.run(packing.run, (*PROVIDER, *grids.split()), ranks, True, sizes, world_size=ranks)
    found = packing.differences(expected, outcomes, TOLERANCE)
    assert not found, "\n".join(found)


# Positions, norms, checkpoint entries

def inspect_module(rank: int, config: Config) -> dict[str, Any]:
    from megatron.core import parallel_state

    from mimo.model.radio import cropped_positions
    from mimo.weights.match import module_pieces
    from tests.support import provider_cases as cases

    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        module = build(grids, config)
        names = sorted(piece.name for piece in module_pieces(module, grids.collections[VISION]))
        encoder = module.encoder
        positions = encoder.position_embeddings[0]
        differences = []
        for grid in ((3, 7), (16, 16), (16, 5), (20, 1)):
            size = tuple(side * config.vision_patch_size for side in grid)
            differences.append(float((cropped_positions(positions, [grid])[0]
                                      - encoder.eval().get_pos_enc(1, input_size=size)[0]).abs().max()))
    return {"names": names, "differences": differences, "initialized": parallel_state.model_parallel_is_initialized(),
            "final_layernorm": encoder.decoder.final_layernorm is not None, "ln_post": encoder.ln_post,
            "align_corners": encoder.interpolate_align_corners, "seq_length": encoder.seq_length,
            "parameters": sum(parameter.numel() for parameter in module.parameters())}


@pytest.mark.parametrize("final_layernorm", [True, False])
def test_norms_names_and_sizes(pool: WorkerPool, final_layernorm: bool) -> None:
    config = dataclasses.replace(DYNAMIC, vision_final_layernorm=final_layernorm)
    (found,) = pool.run(inspect_module, config, world_size=1)
    assert not found["initialized"]  # the checkpoint's entries came of the module's own groups
    assert found["final_layernorm"] == final_layernorm and found["ln_post"] is None
    assert not found["align_corners"] and max(found["differences"]) < 5e-6
    assert found["names"] == sorted(rule.megatron for rule in provider.weight_map(config, VISION).rules)
    assert not any("ln_post" in name for name in found["names"])
    assert "input_projections.0.linear_fc1.layer_norm_weight" in found["names"]
    shapes = provider.parameter_shapes(config, VISION)
    assert found["parameters"] == sum(math.prod(shape.shape) * shape.count for shape in shapes)
    assert found["seq_length"] == 0


# Training mode

def repeat(rank: int, config: Config, frozen: bool) -> dict[str, Any]:
    """Pass three times over the same images in training mode, and say whether the projector still trains."""
    from tests.support import provider_cases as cases

    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        module = build(grids, config)
    if frozen:
        module.encoders.requires_grad_(False)
    _, inputs = inputs_of(config, [config.image_shape] * 2)
    passes = []
    for _ in range(3):
        module.train()
        passes.append(module(inputs))
    passes[0].sum().backward()
    gradient = module.encoder.position_embeddings.grad
    module.eval()
    return {"equal": [torch.equal(passes[0], other) for other in passes[1:]],
            "as_eval": torch.equal(passes[0], module(inputs)), "trains": passes[0].requires_grad,
            "projector": module.input_projections[0].layer_norm.weight.grad is not None,
            "positions": 0.0 if gradient is None else float(gradient.abs().max())}


@pytest.mark.slow
@pytest.mark.parametrize("base", [SMALL, WIDE, DYNAMIC], ids=["fixed", "fixed-wide", "dynamic"])
@pytest.mark.parametrize(("augmentation", "frozen"), [(False, False), (True, True), (True, False)])
def test_training_draws_crops_of_the_positions_on_request_only(pool, base, augmentation, frozen):
    config = dataclasses.replace(base, vision_cpe_augmentation=augmentation)
    (found,) = pool.run(repeat, config, frozen, world_size=1)
    draws = augmentation and not frozen
    assert found["equal"] == [not draws] * 2 and found["as_eval"] == (not draws)
    assert found["trains"] and found["projector"] and (found["positions"] > 0) == (not frozen)


def fixed_and_packed(rank: int, config: Config) -> list[torch.Tensor]:
    """Tokens of one image in training mode from equal random numbers, of a model of its size and of one of any size."""
    from tests.support import provider_cases as cases

    tokens = []
    for dynamic in (False, True):
        as_taken = dataclasses.replace(config, vision_dynamic_resolution=dynamic, vision_cpe_augmentation=True)
        with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
            module = build(grids, as_taken).train()
        torch.manual_seed(3)
        tokens.append(module(inputs_of(as_taken, [config.image_shape])[1]).detach())
    return tokens


@pytest.mark.slow
def test_a_fixed_image_that_is_not_square_draws_its_crop_as_a_packed_one(pool: WorkerPool) -> None:
    ((fixed, packed),) = pool.run(fixed_and_packed, WIDE, world_size=1)
    torch.testing.assert_close(fixed, packed, rtol=0, atol=float(TOLERANCE * packed.abs().max()))


def call_wrongly(rank: int) -> dict[str, str]:
    from tests.support import provider_cases as cases

    said = {}
    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        for name, config in (("fixed", SMALL), ("wide", WIDE), ("dynamic", DYNAMIC)):
            module = build(grids, config)
            assert module({}).shape == (0, config.hidden_size) and module(None).requires_grad
            _, inputs = inputs_of(config, [config.image_shape])
            changes = {"whole": {"pixel_values": torch.zeros(2, 3, 96, 32)}}
            if config is DYNAMIC:
                changes |= {"patches": {"pixel_values": inputs["pixel_values"][:, 1:]},
                            "sizes": {"imgs_sizes": inputs["imgs_sizes"] * 2}}
            for what, change in changes.items():
                with pytest.raises(ValueError, match="pixel_values has shape") as caught:
                    module(inputs | change)
                said[f"{what} {name}"] = str(caught.value)
    return said


@pytest.mark.slow
def test_images_of_another_size_are_refused(pool: WorkerPool) -> None:
    (said,) = pool.run(call_wrongly, world_size=1)
    assert "[2, 3, 96, 32]" in said["whole fixed"] and "3, 64, 64" in said["whole fixed"]
    assert "[2, 3, 96, 32]" in said["whole wide"] and "3, 32, 96" in said["whole wide"]
    assert "[1, 63, 192]" in said["patches dynamic"] and "[64] patches" in said["patches dynamic"]
    assert "[256] patches" in said["sizes dynamic"] and "[2, 3, 96, 32]" in said["whole dynamic"]


# Hugging Face folders

def test_a_folder_loads_and_exports_to_the_bit(pool: WorkerPool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (names,) = pool.run(weights.write_source, PROVIDER, str(source), world_size=1)
    assert "vision_model.radio_model.model.blocks.1.attn.qkv.bias" in names and "mlp1.3.weight" in names
    flags = (*PROVIDER, "--encoder-tp", "2")
    for wrong, count, elements in pool.run(weights.load_and_export, flags, 3, str(source), str(out), world_size=3):
        assert wrong == [] and count == elements > 0
    stored, found = weights.read_folder(source), weights.read_folder(out)
    assert sorted(stored) == sorted(found) == names
    assert [name for name in names if not torch.equal(stored[name], found[name])] == []
