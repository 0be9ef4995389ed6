"""Weight maps against the names that transformers gives its tensors, saved and in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.protocols import LANGUAGE
from mimo.weights.match import ModuleMatch, check_tensor, match_source
from mimo.weights.rules import WeightMap
from mimo.weights.safetensors_io import Catalog, HfSource, SourceTensor
from providers import causal_lm, deepseek_v3, llava, llava_next, nemotron_h, qwen2_5_vl, qwen3_vl
from providers.common.family import VISION
from tests.support.hf_families import LLAVA_MODELS, MODELS, QWEN_MODELS, TEXT_MODELS, build_hf

Shapes = Mapping[str, Iterable[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[str, tuple[int, ...]]]]:
    """name -> (transformers' model, shapes of what it saves by name)."""
    pytest.importorskip("transformers")
    built: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {}

    def get(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
        if name not in built:
            model = build_hf(name)
            built[name] = model, saved_shapes(model, tmp_path_factory.mktemp(name))
        return built[name]

    return get


def saved_shapes(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    model.save_pretrained(folder)
    return {name: entry.shape for name, entry in HfSource(folder).tensors.items()}


def catalog(shapes: Shapes) -> Catalog:
    return Catalog("folder", {name: SourceTensor(tuple(shape), torch.float32, "F32", "model.safetensors")
                              for name, shape in shapes.items()}, {})


def match(shapes: Shapes, maps: Mapping[str, WeightMap], wanted: Iterable[str]) -> dict[str, ModuleMatch]:
    """Match every wanted module; fails on anything missing, unused or of another shape."""
    source = catalog(shapes)
    found, problems = match_source(source, {module: maps[module] for module in wanted},
                                   {module: rules for module, rules in maps.items() if module not in wanted})
    for module in wanted:
        for rule in found[module].rules.values():
            problems += check_tensor(found[module], rule, source, None, torch.float32)
    assert problems == []
    return found


def maps_of(model: Any) -> dict[str, WeightMap]:
    """Maps of the modules of our model with the same configuration."""
    sizes = model.config.to_dict()
    if sizes["model_type"] == "nemotron_h":
        return {LANGUAGE: nemotron_h.provider.weight_map(nemotron_h.from_hf(sizes), LANGUAGE)}
    if sizes["model_type"] == "deepseek_v3":
        return {LANGUAGE: deepseek_v3.provider.weight_map(deepseek_v3.from_hf(sizes), LANGUAGE)}
    if sizes["model_type"] in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        family: Any = qwen2_5_vl if sizes["model_type"] == "qwen2_5_vl" else qwen3_vl
        own = family.from_hf(sizes)
        return {module: family.provider.weight_map(own, module) for module in (VISION, LANGUAGE)}
    if sizes["model_type"] not in ("llava", "llava_next"):
        return {LANGUAGE: causal_lm.provider.weight_map(causal_lm.from_hf(sizes), LANGUAGE)}
    kind: Any = llava if sizes["model_type"] == "llava" else llava_next
    config = kind.from_hf(sizes)
    return {module: kind.provider.weight_map(config, module) for module in (VISION, LANGUAGE)}


def renamed(shapes: Shapes, *changes: tuple[str, str]) -> dict[str, Iterable[int]]:
    """Apply the first change whose pattern matches a name."""
    found = {}
    for name, shape in shapes.items():
        pattern, replacement = next(((old, new) for old, new in changes if re.search(old, name)), ("", ""))
        found[re.sub(pattern, replacement, name, count=1) if pattern else name] = shape
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tensors_that_transformers_saves_are_matched(models: Any, name: str) -> None:
    model, shapes = models(name)
    maps = maps_of(model)
    found = match(shapes, maps, list(maps))
    assert all(not module.absent for module in found.values())
    if name in TEXT_MODELS:  # of a vision tower some tensors are passed over
        module = found[LANGUAGE]
        assert {source for rule in module.rules.values() for source in module.sources(rule)} == shapes.keys()


@pytest.mark.parametrize("name", QWEN_MODELS)
def test_names_in_memory_of_a_qwen_vl_are_matched(models: Any, name: str) -> None:
    model, shapes = models(name)
    maps = maps_of(model)
    held = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if "lm_head.weight" not in shapes:
        del held["lm_head.weight"]
    # Only Qwen2.5-VL has other names in files.
    assert (held.keys() == shapes.keys()) == name.startswith("qwen3") and len(held) == len(shapes)
    match(held, maps, list(maps))


@pytest.mark.parametrize("name", LLAVA_MODELS)
def test_every_spelling_of_a_llava_is_matched(models: Any, name: str) -> None:
    model, shapes = models(name)
    maps = maps_of(model)
    hub = renamed(shapes, (r"^vision_tower\.", "vision_tower.vision_model."))
    assert match(hub, maps, list(maps))[VISION].scheme == maps[VISION].schemes[0]
    assert match(hub, maps, list(maps))[LANGUAGE].scheme == maps[LANGUAGE].schemes[0]
    in_memory = renamed(shapes, (r"^language_model\.lm_head\.", "lm_head."),
                        (r"^language_model\.model\.", "model.language_model."), (r"^", "model."))
    if "moe" not in name:  # in memory, experts are stacked
        held = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert {key: tuple(shape) for key, shape in in_memory.items()} == {
            key: shape for key, shape in held.items() if key in in_memory}
    match(in_memory, maps, list(maps))
    match(renamed(in_memory, (r"^model\.vision_tower\.", "model.vision_tower.vision_model.")), maps, list(maps))
    # Buffers that earlier versions saved.
    old = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
           "vision_tower.vision_model.embeddings.position_ids": (1, 5)}
    match({**hub, **old}, maps, list(maps))


def test_language_and_vision_come_from_models_of_their_own(models: Any, tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, CLIPVisionModelWithProjection, SiglipConfig, SiglipModel

    for name, kinds in {"clip-llama": (CLIPConfig, CLIPModel), "siglip-qwen3": (SiglipConfig, SiglipModel)}.items():
        model, shapes = models(name)
        maps = maps_of(model)
        text = models({"clip-llama": "llama", "siglip-qwen3": "qwen3"}[name])[1]
        if name == "siglip-qwen3":  # the same sizes
            assert match(text, maps, [LANGUAGE])[LANGUAGE].absent == []
            assert match(shapes, maps_of(models("qwen3")[0]), [LANGUAGE])[LANGUAGE].absent == []
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "vocab_size": 64, "max_position_embeddings": 16}
        joint = kinds[1](kinds[0](vision_config=model.config.vision_config.to_dict(), text_config=small))
        towers = [saved_shapes(joint, tmp_path / f"{name}-joint"),
                  saved_shapes(model.model.vision_tower, tmp_path / f"{name}-tower")]
        towers.append(renamed(towers[1], (r"^", "vision_model.")))  # a vision model of transformers 4
        if name == "clip-llama":
            projected = CLIPVisionModelWithProjection(model.config.vision_config)
            towers.append(saved_shapes(projected, tmp_path / "projected"))
        for tower in towers:
            found = match(tower, maps, [VISION])[VISION]
            assert found.absent == [f"input_projections.0.linear_fc{number}.{kind}" for number in (1, 2)
                                    for kind in ("weight", "bias")]


def problems_of(shapes: Shapes, maps: Mapping[str, WeightMap]) -> list[str]:
    return match_source(catalog(shapes), maps, {})[1]


def test_foreign_and_missing_tensors_are_named(models: Any) -> None:
    model, shapes = models("clip-llama")
    maps = maps_of(model)
    extra = "vision_tower.encoder.layers.3.mlp.fc1.bias"  # the first that runs is 0, the last 1, 2 is unused
    assert problems_of({**shapes, extra: (48,)}, maps) == [f"not used: {extra} [48] (model.safetensors)"]
    for gone in ("language_model.lm_head.weight", "vision_tower.encoder.layers.1.self_attn.v_proj.bias",
                 "multi_modal_projector.linear_1.weight"):
        (line,) = problems_of({name: shape for name, shape in shapes.items() if name != gone}, maps)
        assert line.startswith(f"missing: {gone} (for ")
    tied, shapes = models("qwen2-tied-one-key-head")
    # The copy of a tied embedding may be there; a norm that the family lacks may not.
    assert problems_of({**shapes, "lm_head.weight": (99, 32)}, maps_of(tied)) == []
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert problems_of({**shapes, norm: (8,)}, maps_of(tied)) == [f"not used: {norm} [8] (model.safetensors)"]
