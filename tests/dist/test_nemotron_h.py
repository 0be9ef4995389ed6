"""Nemotron-H against transformers' model after an import, on several layouts; exports and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import hf_families
from tests.support.hf_families import NEMOTRON_MODELS, VOCAB_SIZE
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of

MAX_ERROR = 1e-4
# name -> (ranks, flags)
LAYOUTS = {
    "one-process": (1, ""),
    "ep2": (2, "--llm-dp 2 --llm-ep 2"),
    "tp2": (2, "--llm-tp 2 --sequence-parallel"),
    "tp2-expert-tp2": (2, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2"),
    "pp2": (2, "--llm-pp 2"),
    "tp2-ep2-pp2": (4, "--llm-tp 2 --sequence-parallel --llm-ep 2 --llm-pp 2"),
}
Saved = dict[str, tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """name -> (folder that transformers saved, its logits by sample)."""
    found = {}
    for name in NEMOTRON_MODELS:
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, pool.run(hf_families.save_hf, name, str(folder), world_size=1)[0]
    return found


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Return names that one side lacks, or whose values are not the same bits."""
    return sorted(ours.keys() ^ theirs.keys()) + [
        name for name in ours.keys() & theirs.keys()
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])]


def test_compared_parameters_have_different_values(saved: Saved) -> None:
    tensors = safetensors_of(saved["nemotron-h"][0])
    for name in ("A_log", "D", "dt_bias", "norm.weight", "conv1d.bias"):
        assert tensors[f"backbone.layers.0.mixer.{name}"].unique().numel() > 1, name
    bias = tensors["backbone.layers.1.mixer.gate.e_score_correction_bias"]
    assert bias.dtype is torch.float32 and bias.unique().numel() == 4


@pytest.mark.parametrize(("name", "layout"), fast_only(
    [("nemotron-h", "one-process"), ("nemotron-h", "tp2"), ("nemotron-h-latent", "one-process"),
     ("nemotron-h-latent", "tp2"), ("nemotron-h-top1", "one-process")],
    itertools.product(NEMOTRON_MODELS, LAYOUTS)))
def test_logits_and_export_equal_hugging_face(pool: WorkerPool, saved: Saved, tmp_path: Path, name: str,
                                              layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    folder, expected = saved[name]
    by_rank = pool.run(hf_families.logits_of, name, str(folder), tuple(flags.split()), world_size,
                       str(tmp_path / "out"), world_size=world_size)
    for found in by_rank:
        for key, logits in found.items():
            assert float((logits[:, :VOCAB_SIZE] - expected[key]).abs().max()) <= MAX_ERROR, key
    assert {key for found in by_rank for key in found} == expected.keys()
    assert differences(safetensors_of(tmp_path / "out"), safetensors_of(folder)) == []


def test_transformers_loads_what_is_exported_in_the_published_spelling(pool: WorkerPool, saved: Saved,
                                                                       tmp_path: Path) -> None:
    folder, expected = saved["nemotron-h"]
    pool.run(hf_families.export, "nemotron-h", str(folder), str(tmp_path / "out"), world_size=1)
    exported = safetensors_of(tmp_path / "out")
    theirs = {name.replace("backbone.embedding.", "backbone.embeddings."): tensor
              for name, tensor in safetensors_of(folder).items()}
    assert differences(exported, theirs) == []
    (found,) = pool.run(hf_families.reloaded_logits, "nemotron-h", str(tmp_path / "out"), str(folder), world_size=1)
    assert found.keys() == expected.keys()
    for key, logits in found.items():
        assert torch.equal(logits, expected[key]), key


@pytest.mark.parametrize(("change", "line"), [
    ({"in_proj.weight": None}, "missing: backbone.layers.0.mixer.in_proj.weight (for language"),
    ({"conv1d.weight2": torch.ones(1)}, "not used: backbone.layers.0.mixer.conv1d.weight2 [1] (model.safetensors)"),
    ({"in_proj.weight": torch.ones(101, 32)},
     "shape: backbone.layers.0.mixer.in_proj.weight is [101, 32] (model.safetensors); language takes [92, 32]"),
    ({"D": torch.ones(5)},
     "shape: backbone.layers.0.mixer.D is [5] (model.safetensors); language decoder.layers.0.mixer.D [4] takes [4]"),
])
def test_a_checkpoint_that_does_not_fit_is_named(pool: WorkerPool, saved: Saved, tmp_path: Path,
                                                 change: dict[str, torch.Tensor | None], line: str) -> None:
    folder, _ = saved["nemotron-h"]
    tensors = safetensors_of(folder)
    for name, tensor in change.items():
        key = f"backbone.layers.0.mixer.{name}"
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (lines,) = pool.run(hf_families.load_errors, "nemotron-h", str(folder), str(tmp_path), world_size=1)
    assert len(lines) == 2 and lines[1].strip().startswith(line), lines
