"""Exports of Nemotron-H and checkpoints that are refused; logits are in test_hf_families.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import hf_families
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of

Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder that transformers saved, and its logits by sample."""
    folder = tmp_path_factory.mktemp("nemotron-h")
    return folder, pool.run(hf_families.save_hf, "nemotron-h", str(folder), world_size=1)[0]


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Return names that one side lacks, or whose values are not the same bits."""
    return sorted(ours.keys() ^ theirs.keys()) + [
        name for name in ours.keys() & theirs.keys()
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])]


def test_compared_parameters_have_different_values(saved: Saved) -> None:
    tensors = safetensors_of(saved[0])
    for name in ("A_log", "D", "dt_bias", "norm.weight", "conv1d.bias"):
        assert tensors[f"backbone.layers.0.mixer.{name}"].unique().numel() > 1, name
    bias = tensors["backbone.layers.1.mixer.gate.e_score_correction_bias"]
    assert bias.dtype is torch.float32 and bias.unique().numel() == 4


def test_transformers_loads_what_is_exported_in_the_published_spelling(pool, saved, tmp_path):
    folder, expected = saved
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
def test_a_checkpoint_that_does_not_fit_is_named(pool, saved, tmp_path, change, line):
    folder, _ = saved
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
