"""Logits of every family against transformers' after an import, on several layouts, and exports against the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mimo.weights.configuration import ROPE_KEYS
from tests.support import hf_families
from tests.support.hf_families import (
    DEEPSEEK_MODELS,
    LLAMA3,
    LLAVA_MODELS,
    LLAVA_NEXT_MODELS,
    NEMOTRON_MODELS,
    QWEN_MODELS,
    TEXT_MODELS,
    VOCAB_SIZE,
)
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of

MAX_ERROR = 1e-4
RELOADED_ERROR = 1e-5
GRADIENT_ERROR = 1e-4
MOE = ("qwen3-moe", "mixtral")
# name -> (ranks, flags)
TEXT_LAYOUTS = {"one-process": (1, ""), "tp2": (2, "--llm-tp 2"), "pp2": (2, "--llm-pp 2")}
MOE_LAYOUTS = {"one-process": (1, ""), "tp2-ep2": (2, "--llm-tp 2 --sequence-parallel --llm-ep 2"),
               "tp2-expert-tp2": (2, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2"), "pp2": (2, "--llm-pp 2"),
               "ep2": (2, "--llm-dp 2 --llm-ep 2")}
NEMOTRON_LAYOUTS = MOE_LAYOUTS | {"tp2": (2, "--llm-tp 2 --sequence-parallel"),
                                  "tp2-ep2-pp2": (4, "--llm-tp 2 --sequence-parallel --llm-ep 2 --llm-pp 2")}
DEEPSEEK_LAYOUTS = {name: NEMOTRON_LAYOUTS[name] for name in ("one-process", "tp2", "pp2", "ep2")}
LLAVA_LAYOUTS = {"one-process": (1, "--layout colocated"), "disjoint": (2, ""),
                 "disjoint-tp2-pp2": (4, "--encoder-tp 2 --llm-pp 2"),
                 "disjoint-pp2-tp2": (4, "--encoder-pp 2 --llm-tp 2 --sequence-parallel")}
LAYOUTS_OF: dict[str, dict[str, tuple[int, str]]] = {
    **{name: MOE_LAYOUTS if name in MOE else TEXT_LAYOUTS for name in TEXT_MODELS},
    **dict.fromkeys(NEMOTRON_MODELS, NEMOTRON_LAYOUTS),
    **dict.fromkeys(DEEPSEEK_MODELS, DEEPSEEK_LAYOUTS),
    **dict.fromkeys((*LLAVA_MODELS, *LLAVA_NEXT_MODELS, *QWEN_MODELS), LLAVA_LAYOUTS),
    "qwen3-vl-moe": LLAVA_LAYOUTS | {
        "disjoint-ep2": (3, "--llm-dp 2 --llm-ep 2"),
        "disjoint-pp2-tp2-ep2": (4, "--encoder-pp 2 --llm-tp 2 --llm-ep 2 --sequence-parallel")},
}
CASES = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]
# Layouts of the fast suite, where more than one process and disjoint grids.
FAST = [("llama", "tp2"), ("qwen2-tied-one-key-head", "tp2"), ("qwen2-tied-one-key-head", "pp2"),
        ("clip-llama", "disjoint-tp2-pp2"), ("clip-last-layer-qwen2-tied", "one-process"),
         ("clip-last-layer-qwen2-tied", "disjoint"), ("qwen2.5-vl", "one-process"), ("nemotron-h", "one-process"),
         ("nemotron-h", "tp2"), ("nemotron-h-latent", "one-process"), ("nemotron-h-latent", "tp2"),
         ("nemotron-h-top1", "one-process"), *(("deepseek-yarn", layout) for layout in DEEPSEEK_LAYOUTS),
         ("llava-next", "disjoint")]
Saved = Callable[[str], tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """name -> (folder that transformers saved, its logits by sample)."""
    found: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def get(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = folder, pool.run(hf_families.save_hf, name, str(folder), world_size=1)[0]
        return found[name]

    return get


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert [name for name, tensor in theirs.items()
            if tensor.dtype != ours[name].dtype or not torch.equal(tensor, ours[name])] == []


@pytest.mark.parametrize(("name", "layout"), fast_only(FAST, CASES))
def test_logits_and_export_equal_hugging_face(pool, saved, tmp_path, name, layout):
    world_size, flags = LAYOUTS_OF[name][layout]
    folder, expected = saved(name)
    out = tmp_path / "out"
    by_rank = pool.run(hf_families.logits_of, name, str(folder), tuple(flags.split()), world_size, str(out),
                       world_size=world_size)
    for found in by_rank:
        for key, logits in found.items():
            assert float((logits[:, :VOCAB_SIZE] - expected[key]).abs().max()) <= MAX_ERROR, key
            assert (logits[:, VOCAB_SIZE:] == torch.finfo(logits.dtype).min).all()
            assert logits.shape[1] > VOCAB_SIZE
    assert {key for found in by_rank for key in found} == expected.keys()
    assert_same_tensors(safetensors_of(out), safetensors_of(folder))


@pytest.mark.parametrize("name", fast_only(("llama", "clip-llama", "deepseek-yarn"), hf_families.MODELS))
def test_transformers_loads_what_is_exported_without_a_base(pool, saved, tmp_path, name):
    folder, expected = saved(name)
    pool.run(hf_families.export, name, str(folder), str(tmp_path / "out"), world_size=1)
    (found,) = pool.run(hf_families.reloaded_logits, name, str(tmp_path / "out"), str(folder), world_size=1)
    assert found.keys() == expected.keys()
    for key, logits in found.items():
        # The tensors are equal bit by bit, but not where they are in memory, which can change how products are rounded.
        assert float((logits - expected[key]).abs().max()) < RELOADED_ERROR, key


@pytest.mark.parametrize("name", fast_only(["qwen2.5-vl", "llava-next", "deepseek-yarn"],
                                           (*QWEN_MODELS, *LLAVA_NEXT_MODELS, *DEEPSEEK_MODELS)))
def test_gradients_are_those_of_transformers(pool: WorkerPool, saved: Saved, tmp_path: Path, name: str) -> None:
    folder, _ = saved(name)
    folders = [str(tmp_path / part) for part in ("theirs", "ours")]
    pool.run(hf_families.save_hf_gradients, name, str(folder), folders[0], world_size=1)
    pool.run(hf_families.export_gradients, name, str(folder), folders[1], world_size=1)
    theirs, ours = (safetensors_of(Path(folder)) for folder in folders)
    # Experts that got no token, and layers of a CLIP tower that are not used.
    assert [key for key, value in theirs.items() if not (value.any() or "experts" in key or "vision_" in key)] == []
    theirs = {key: value for key, value in theirs.items() if value.any()}
    # Without a base, exports name the tower as published files do.
    ours = {key.replace("vision_tower.vision_model.", "vision_tower."): value for key, value in ours.items()
            if value.any()}
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    # Without rotary positions, the bias of keys adds the same to all scores of a query. So its gradient is rounding.
    scale = {key: theirs[key.replace("k_proj", "q_proj")] if key.startswith("vision_tower") and "k_proj.bias" in key
             else value for key, value in theirs.items()}
    errors = {key: float((ours[key] - value).abs().max() / scale[key].abs().max()) for key, value in theirs.items()}
    assert not {key: error for key, error in errors.items() if not error < GRADIENT_ERROR}


@pytest.mark.parametrize("name", ["clip-llama", pytest.param("siglip-qwen3", marks=pytest.mark.slow)])
def test_modules_come_from_models_of_their_own(pool: WorkerPool, saved: Saved, tmp_path: Path, name: str) -> None:
    folder, _ = saved(name)
    parts = [str(tmp_path / part) for part in ("tower", "text")]
    pool.run(hf_families.save_parts, name, *parts, world_size=1)
    (found,) = pool.run(hf_families.load_parts, name, str(folder), *parts, world_size=1)
    projector = [f"input_projections.0.linear_fc{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
    assert found["absent"] == {"vision": projector}
    assert sorted(key.split()[0] for key in found["changed"]) == sorted(f"vision.{tensor}" for tensor in projector)
    assert found["text"] == []


@pytest.mark.slow
def test_values_that_a_run_cannot_start_from_are_named(pool: WorkerPool, saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("qwen2-tied-one-key-head")
    tensors = safetensors_of(folder)
    embedding, bias = "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"
    for name, changes, words in (
            ("tied", {"lm_head.weight": tensors[embedding] + 1},
             f"values: lm_head.weight differs from {embedding}: the output layer is tied"),
            ("same", {"lm_head.weight": tensors[embedding].clone()}, ""),
            ("nan", {bias: torch.full_like(tensors[bias], torch.nan)}, f"values: {bias} holds NaN")):
        (tmp_path / name).mkdir()
        save_file(tensors | changes, tmp_path / name / "model.safetensors", {"format": "pt"})
        (lines,) = pool.run(hf_families.load_errors, "qwen2-tied-one-key-head", str(folder), str(tmp_path / name),
                            world_size=1)
        assert words in "".join(lines) and bool(lines) == bool(words), lines


def test_a_stale_output_layer_of_a_tied_base_is_not_exported(pool: WorkerPool, saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("qwen2-tied-one-key-head")
    base = shutil.copytree(folder, tmp_path / "base")
    tensors = safetensors_of(base)
    save_file(tensors | {"lm_head.weight": torch.ones_like(tensors["model.embed_tokens.weight"])},
              base / "model.safetensors", {"format": "pt"})
    pool.run(hf_families.export, "qwen2-tied-one-key-head", str(folder), str(tmp_path / "out"), str(base),
             world_size=1)
    assert_same_tensors(safetensors_of(tmp_path / "out"), tensors)


@pytest.mark.slow
def test_a_folder_of_another_function_is_refused(pool: WorkerPool, saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("llama")
    other = shutil.copytree(folder, tmp_path / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-5}))
    ((head, line),) = pool.run(hf_families.load_errors, "llama", str(folder), str(other), world_size=1)
    assert "computes something else (1 problem)" in head
    assert f"--load-hf {other}: config.json: --norm-epsilon 0.05, but 1e-05 there (rms_norm_eps)" in line
    (error,) = pool.run(hf_families.import_error, "llama", str(folder), str(other), str(tmp_path / "save"),
                        world_size=1)
    assert f"{other}: its weights belong to a model that computes something else" in error
    assert "--allow-difference norm-epsilon" in error and not (tmp_path / "save").exists()


@pytest.mark.parametrize("name", fast_only(("qwen3-vl", "qwen3-vl-moe"), hf_families.MODELS))
def test_what_is_imported_is_exported_as_it_was(pool: WorkerPool, saved: Saved, tmp_path: Path, name: str) -> None:
    folder, _ = saved(name)
    (differences,) = pool.run(hf_families.import_and_export, name, str(folder), str(folder), str(tmp_path / "save"),
                              world_size=1)
    assert differences == []
    assert_same_tensors(safetensors_of(tmp_path / "save" / "out"), safetensors_of(folder))


def test_experts_as_transformers_saves_them_are_exported_as_published(pool: WorkerPool, saved: Saved,
                                                                      tmp_path: Path) -> None:
    name, stacked = "qwen3-vl-moe", ("experts.gate_up_proj", "experts.down_proj")
    folder, _ = saved(name)
    source = shutil.copytree(folder, tmp_path / "source")
    published = safetensors_of(folder)
    save_file({key: tensor.mT.contiguous() if key.endswith(stacked) else tensor for key, tensor in published.items()},
              source / "model.safetensors", {"format": "pt"})
    pool.run(hf_families.import_and_export, name, str(folder), str(source), str(tmp_path / "save"), world_size=1)
    assert_same_tensors(safetensors_of(tmp_path / "save" / "out"), published)


@pytest.mark.parametrize(("name", "section", "changes"), [
    ("llama", "", {"": {"rms_norm_eps": 0.2, "rope_parameters": {**LLAMA3, "factor": 2.0, "rope_theta": 100.0}}}),
    ("clip-llama", "text_config", {"text_config": {"rms_norm_eps": 0.2, "rope_theta": 100.0},
                                   "vision_config": {"layer_norm_eps": 0.2, "hidden_act": "gelu"}}),
])
def test_an_export_has_the_values_of_the_run_and_not_those_of_its_base(pool, saved, tmp_path, name, section, changes):
    base, before = saved(name)
    own, out = shutil.copytree(base, tmp_path / "own"), tmp_path / "out"
    values = json.loads((own / "config.json").read_text())
    for place, change in changes.items():
        target = values[place] if place else values
        for key in ROPE_KEYS if "rope_theta" in str(change) else ():
            target.pop(key, None)
        target |= change
    (own / "config.json").write_text(json.dumps(values))
    layout = ("--layout", "colocated") if section else ()
    (found,) = pool.run(hf_families.logits_of, name, str(own), layout, 1, str(out), str(base), world_size=1)
    (after,) = pool.run(hf_families.reloaded_logits, name, str(out), str(base), world_size=1)
    for key, logits in after.items():
        assert float((found[key][:, :VOCAB_SIZE] - logits).abs().max()) <= MAX_ERROR, key
    assert max(float((after[key] - before[key]).abs().max()) for key in after) > 0.05, "the values matter"
    told = json.loads((out / "config.json").read_text())
    assert (told[section] if section else told)["rms_norm_eps"] == 0.2
